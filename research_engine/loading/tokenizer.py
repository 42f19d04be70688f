"""Text to token ids and back: one class over every source of a tokenizer, with chat templates and streaming."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from research_engine.loading.chat_template import ChatTemplate
from research_engine.loading.detokenizer import DecodeStream, decode_stream_factory, token_bytes_of
from research_engine.loading.dummy import BYTE_TOKENIZER_SPECIALS
from research_engine.loading.errors import LoadError

if TYPE_CHECKING:
    from research_engine.loading.gguf import GgufFile

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


_LONG = 4096
"""Characters or tokens, of some two milliseconds, from which the backend's batches are asked: for single texts it holds
Python's lock all the while, and a server's other requests would wait.
"""


def _no_stream(skip_special_tokens: bool) -> DecodeStream:
    raise ValueError("the tokenizer of an encoder makes no text token by token")


class Tokenizer:
    """A tokenizer with its special tokens and, if it has one, its chat template.

    Args:
        streams: whether text is to be made token by token, which only some kinds of tokenizers can; without it
            `decode_stream` raises ValueError.

    Attributes:
        vocab_size: ids the tokenizer knows, added tokens included; the model's vocabulary may be padded beyond it.
        base_vocab_size: without added tokens; a model must have an embedding for each of these.
        bos_token_id: begin of text, or None.
        eos_token_ids: tokens that end a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        streams: bool = True,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.base_vocab_size: int = backend.get_vocab_size(with_added_tokens=False)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        tokens = {
            "bos_token": self._content(bos_token_id),
            "eos_token": self._content(next(iter(self.eos_token_ids), None)),
        }
        self._config = {**tokens, "chat_template": chat_template}
        self._chat_template = None if chat_template is None else ChatTemplate(chat_template, tokens)
        self._adds_bos = bos_token_id is not None and self.encode("")[:1] == [bos_token_id]
        self._new_stream = decode_stream_factory(backend) if streams else _no_stream
        self._token_bytes = token_bytes_of(backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. ``add_special_tokens``: with the begin (and end) tokens the model was trained with.

        Raises:
            ValueError: the text holds a lone surrogate.
        """
        try:
            if len(text) < _LONG:
                made = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                (made,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = made.ids
        except TypeError as error:
            raise ValueError(f"{text!r} is no valid Unicode: {error}") from error
        return ids

    def encode_batch(self, texts: Sequence[str], max_tokens: int | None = None) -> list[list[int]]:
        """Token ids of texts, on all cores; a text of more than `max_tokens` is cut, its special tokens kept.

        Raises:
            ValueError: as `encode`.
        """
        if max_tokens is not None:
            self._backend.enable_truncation(max_tokens)
        try:
            return [made.ids for made in self._backend.encode_batch_fast(list(texts))]
        except TypeError as error:
            raise ValueError(f"one of {len(texts)} texts is no valid Unicode: {error}") from error
        finally:
            self._backend.no_truncation()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that form no character become U+FFFD, ids beyond the vocabulary nothing."""
        text: str
        if len(ids) < _LONG:
            text = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; part of a character if the token is."""
        return self._token_bytes(token_id)

    def decode_stream(self, skip_special_tokens: bool = True) -> DecodeStream:
        """A decoder for tokens as they come; what it returns adds up to ``decode`` of all of them."""
        return self._new_stream(skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, ``[{"role": ..., "content": ...}]``; one begin token if the model uses it.

        ``variables`` are what the template may know besides, such as ``tools``.

        Raises:
            ValueError: the tokenizer has no chat template, or the template refuses the conversation.
        """
        if self._chat_template is None:
            raise ValueError("this model has no chat template: pass a prompt instead of messages")
        ids = self.encode(
            self._chat_template.render(messages, add_generation_prompt, **variables), add_special_tokens=False
        )
        if self._adds_bos and self.bos_token_id is not None:  # whether or not the template wrote it
            start = next((i for i, token in enumerate(ids) if token != self.bos_token_id), len(ids))
            ids = [self.bos_token_id, *ids[start:]]
        return ids

    def to_json(self) -> str:
        """All of the tokenizer in the format of tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def config(self) -> dict[str, str | None]:
        """Its special tokens and chat template, by their names in tokenizer_config.json."""
        return dict(self._config)

    def _content(self, token_id: int | None) -> str | None:
        token: str | None = None if token_id is None else self._backend.id_to_token(token_id)
        return token


def tokenizer_from_directory(
    directory: Path, eos_token_ids: Sequence[int] = (), *, trust_remote_code: bool = False, streams: bool = True
) -> Tokenizer:
    """Read ``tokenizer.json`` (or what transformers can turn into one), its configuration and chat template.

    ``eos_token_ids`` are the model's own; the tokenizer's end token is added to them. With ``trust_remote_code`` the
    code that a repository brings for its tokenizer is run where there is no ``tokenizer.json``. ``streams`` is as
    `Tokenizer` takes it.

    Raises:
        LoadError: there is no tokenizer, or a file of it is corrupt.
    """
    path, config_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
    config: dict[str, Any] = {}
    try:
        if config_path.exists():
            config = json.loads(config_path.read_text(encoding="utf-8"))
        backend = (
            tokenizers.Tokenizer.from_file(str(path)) if path.exists() else _converted(directory, trust_remote_code)
        )
        template = _template_of(directory, config)
    except LoadError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot parse
        raise LoadError(f"{directory}: the tokenizer cannot be read: {error}") from error
    bos, eos = (_token_id(backend, config.get(key)) for key in ("bos_token", "eos_token"))
    ends = [*eos_token_ids, *([] if eos is None else [eos])]
    return Tokenizer(backend, bos_token_id=bos, eos_token_ids=ends, chat_template=template, streams=streams)


def _converted(directory: Path, trust_remote_code: bool) -> tokenizers.Tokenizer:
    known = any((directory / name).exists() for name in ("tokenizer.model", "vocab.json", "vocab.txt"))
    if not known and not trust_remote_code:
        raise LoadError(
            f"{directory}: no tokenizer (tokenizer.json, tokenizer.model, vocab.json or vocab.txt); copy it there, "
            "or pass token ids and skip_tokenizer_init=True"
        )
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=trust_remote_code)
    backend = getattr(made, "backend_tokenizer", None)
    if backend is None:
        raise LoadError(
            f"{directory}: the tokenizer {type(made).__name__} is written in Python and cannot be turned into a fast "
            "one; pass token ids and skip_tokenizer_init=True"
        )
    return backend


def _token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """A special token of tokenizer_config.json, given as its text or as a dictionary with ``content``."""
    content = token.get("content") if isinstance(token, dict) else token
    token_id: int | None = backend.token_to_id(content) if isinstance(content, str) else None
    return token_id


def _template_of(directory: Path, config: Mapping[str, Any]) -> str | None:
    """``chat_template.jinja`` wins; a list of named templates means its ``default``."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes in the order of their values; three ChatML tokens follow. Needs no file."""
    from research_engine.loading.detokenizer import BYTE_TO_CHAR

    vocabulary = {BYTE_TO_CHAR[byte]: byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in BYTE_TOKENIZER_SPECIALS])
    return Tokenizer(backend, bos_token_id=257, eos_token_ids=(258,), chat_template=CHATML)


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """Rebuild the tokenizer from the metadata of a GGUF file.

    Raises:
        LoadError: a key is missing, or the kind of tokenizer is not supported.
    """
    from research_engine.loading.gguf_tokenizer import build_backend

    metadata = file.metadata
    backend = build_backend(metadata, str(file.path))
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama")
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    around = [
        (backend.id_to_token(i), i) for i, wanted in ((bos, adds_bos), (eos, adds_eos)) if wanted and i is not None
    ]
    if around:
        begin = f"{backend.id_to_token(bos)} " if adds_bos and bos is not None else ""
        end = f" {backend.id_to_token(eos)}" if adds_eos and eos is not None else ""
        added = processors.TemplateProcessing(
            single=f"{begin}$A{end}", pair=f"{begin}$A $B{end}", special_tokens=around
        )
        backend.post_processor = added
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return Tokenizer(
        backend,
        bos_token_id=bos,
        eos_token_ids=[i for i in ends if i is not None],
        chat_template=metadata.get("tokenizer.chat_template"),
    )

"""Encoding, decoding, streaming and chat templates, for every family of tokenizers and for SmolLM2's own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from research_engine.loading import LoadError, load_tokenizer, resolve_model
from research_engine.loading.gguf_tokenizer import build_backend
from research_engine.loading.tokenizer import Tokenizer, byte_tokenizer, tokenizer_from_directory
from tests.models.smollm2 import smollm2_source
from tests.models.tiny_llama import make_reference, saved

BYTES = byte_tokenizer()
UTF8_EDGES = [0x7F, 0x80, 0xBF, 0xC0, 0xC2, 0xDF, 0xE0, 0xA0, 0x9F, 0xED, 0xEF, 0xF0, 0x90, 0xF4, 0x8F, 0xF5, 0xFF]
some_bytes = st.lists(st.one_of(st.sampled_from(UTF8_EDGES), st.integers(0, 262)), max_size=12)


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    stream = tokenizer.decode_stream(skip)
    text = "".join(stream.push(i) for i in ids) + stream.finish()
    assert stream.finish() == ""
    return text


def test_the_byte_tokenizer_maps_bytes_to_their_values() -> None:
    assert BYTES.encode("é\n") == list("é\n".encode())
    assert BYTES.encode("a<|im_end|>") == [97, 258]
    assert BYTES.vocab_size == 259 and BYTES.eos_token_ids == (258,)


@pytest.mark.parametrize("special", [False, True])
def test_a_long_text_becomes_what_a_short_one_becomes(special: bool) -> None:
    backend = byte_tokenizer()._backend
    backend.post_processor = processors.TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", 258)])
    for times in (1, 10_000):
        ids = Tokenizer(backend).encode("ab" * times, add_special_tokens=special)
        assert ids == [258] * special + [97, 98] * times
    with pytest.raises(ValueError, match="is no valid Unicode"):
        Tokenizer(backend).encode("a" * 10_000 + "\ud800")


class Locked:
    """A backend whose `encode` and `decode`, which hold Python's lock, take nothing long."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode(self, text: str, **options: Any) -> tokenizers.Encoding:
        assert len(text) < 8192
        return self._backend.encode(text, **options)

    def decode(self, ids: list[int], **options: Any) -> str:
        assert len(ids) < 8192
        return self._backend.decode(ids, **options)


def test_a_long_text_is_encoded_and_decoded_without_pythons_lock() -> None:
    tokenizer = Tokenizer(Locked(byte_tokenizer()._backend), chat_template="{{ messages[0].content }}")
    assert tokenizer.encode("ab" * 10_000) == [97, 98] * 10_000
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab" * 10_000}]) == [97, 98] * 10_000
    assert tokenizer.decode([97, 98, 258] * 10_000) == "ab" * 10_000
    assert tokenizer.decode([97, 258] * 10_000, skip_special_tokens=False) == "a<|im_end|>" * 10_000


@given(st.text())
def test_text_survives_the_byte_tokenizer(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids, skip_special_tokens=False) == text
    assert streamed(BYTES, ids, skip=False) == text


@settings(max_examples=500)
@given(ids=some_bytes, skip=st.booleans())
def test_a_stream_adds_up_to_the_whole_even_for_broken_utf8(ids: list[int], skip: bool) -> None:
    assert streamed(BYTES, ids, skip) == BYTES.decode(ids, skip)


def test_a_character_comes_out_with_its_last_byte_and_not_before() -> None:
    stream = BYTES.decode_stream()
    assert [stream.push(i) for i in "a€".encode()] == ["a", "", "", "€"]
    assert stream.push(0xE2) == "" and stream.finish() == "\ufffd"


# -- SentencePiece, from GGUF metadata ------------------------------------------------------------------------------

WORDS = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc", "▁abc", "ca", "cab"]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(WORDS)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(1 + (i * 5) % len(WORDS)) for i in range(len(WORDS))],
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def naive_sentencepiece(text: str, metadata: dict[str, Any]) -> list[int]:
    """The definition: while any adjacent pair joins to a piece, join the best-scored one, leftmost first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids, scores = {t: i for i, t in enumerate(tokens)}, metadata["tokenizer.ggml.scores"]
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [a + b for a, b in itertools.pairwise(pieces)]
        joins = [(-scores[ids[pair]], i) for i, pair in enumerate(pairs) if pair in ids]
        if not joins:
            break
        _, i = min(joins)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    out = []
    for piece in pieces:
        out += [ids[piece]] if piece in ids else [ids[f"<0x{b:02X}>"] for b in piece.encode()]
    return out


@settings(max_examples=300)
@given(st.text(alphabet="abc dé", min_size=1, max_size=12))
def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(text: str) -> None:
    metadata = sentencepiece_metadata()
    tokenizer = Tokenizer(build_backend(metadata, "test"))
    ids = tokenizer.encode(text)
    assert ids == naive_sentencepiece(text, metadata)
    assert tokenizer.decode(ids) == text


@settings(max_examples=300)
@given(
    ids=st.lists(
        st.one_of(st.integers(0, 275), st.sampled_from([3 + b for b in UTF8_EDGES]), st.just(259)), max_size=10
    ),
    skip=st.booleans(),
)
def test_a_sentencepiece_stream_adds_up_to_the_whole(ids: list[int], skip: bool) -> None:
    for prefix in (True, False):
        tokenizer = Tokenizer(
            build_backend(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": prefix}), "test")
        )
        assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5' is not supported; supported: gpt2, llama"),
        ({"tokenizer.ggml.tokens": None}, "carries no tokenizer"),
        ({"tokenizer.ggml.scores": [0.0]}, "tokens and 1 tokenizer.ggml.scores"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokens and 2 token types"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "1 tokens appear twice"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smolm"},
            "'smolm' is not supported; supported: smollm,",
        ),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a z"]}, "merge 'a z' names a token outside"),
        ({"tokenizer.ggml.model": "gpt2"}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": 1.5}, "tokenizer.ggml.tokens holds a float"),
        ({"tokenizer.ggml.merges": [1, 2]}, "tokenizer.ggml.merges holds a list"),
        ({"tokenizer.ggml.pre": 0}, "tokenizer.ggml.pre holds a int"),
    ],
)
def test_what_a_file_lacks_or_contradicts_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        build_backend(sentencepiece_metadata(**changes), "file.gguf")


# -- directories ----------------------------------------------------------------------------------------------------


def write_directory(path: Path, *, adds_bos: bool, config: dict[str, Any]) -> Path:
    backend = tokenizers.Tokenizer(models.BPE(vocab=BYTES._backend.get_vocab(with_added_tokens=False), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 256)]
        )
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


@pytest.mark.parametrize("written", ["{{ bos_token }}", "", "{{ bos_token }}{{ bos_token }}"])
def test_a_conversation_begins_with_exactly_one_bos(written: str, tmp_path: Path) -> None:
    template = written + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = {**TOKENS, "chat_template": template}
    tokenizer = tokenizer_from_directory(write_directory(tmp_path, adds_bos=True, config=config), (9,))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == [256, 104, 105]
    assert tokenizer.encode("hi") == [256, 104, 105] and tokenizer.encode("hi", add_special_tokens=False) == [104, 105]
    assert tokenizer.eos_token_ids == (9, 257)


def test_a_template_that_writes_no_bos_gets_none_if_the_tokenizer_adds_none(tmp_path: Path) -> None:
    config = {
        **TOKENS,
        "chat_template": [
            {"name": "tools", "template": "x"},
            {"name": "default", "template": "{{ messages[0].content }}"},
        ],
    }
    tokenizer = tokenizer_from_directory(write_directory(tmp_path, adds_bos=False, config=config))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == [104, 105]


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    write_directory(tmp_path, adds_bos=False, config={**TOKENS, "chat_template": "config"})
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}{% if add_generation_prompt %}!{% endif %}")
    tokenizer = tokenizer_from_directory(tmp_path)
    messages = [{"role": "user", "content": "hi"}] * 2
    assert tokenizer.decode(tokenizer.apply_chat_template(messages)) == "2!"
    assert tokenizer.decode(tokenizer.apply_chat_template(messages, add_generation_prompt=False)) == "2"


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "refuses|unsafe"),
        ("{{ messages.append(1) }}", "refuses|unsafe"),
        ("{{ messages[0]['content'] + 1 }}", "fails on this conversation"),
    ],
)
def test_what_a_template_refuses_is_said_and_it_cannot_reach_out(template: str, named: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer()._backend, chat_template=template)
    with pytest.raises(ValueError, match=named):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_bad_conversations_and_missing_templates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one message"):
        BYTES.apply_chat_template([])
    with pytest.raises(ValueError, match="message 0 must be a dictionary with 'role'"):
        BYTES.apply_chat_template([{"content": "hi"}])
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer_from_directory(write_directory(tmp_path, adds_bos=False, config={})).apply_chat_template(
            [{"role": "user"}]
        )


def test_a_directory_without_or_with_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no tokenizer"):
        tokenizer_from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match="the tokenizer cannot be read"):
        tokenizer_from_directory(tmp_path)


# -- SmolLM2 --------------------------------------------------------------------------------------------------------

CHAT = [
    1,
    9690,
    198,
    2683,
    359,
    253,
    5356,
    5646,
    11173,
    3365,
    3511,
    308,
    34519,
    28,
    7018,
    411,
    407,
    19712,
    8182,
    2,
    198,
]

# bytes that its training text never held and that its vocabulary therefore lacks: they encode to nothing
UNSPELLABLE = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(smollm2_source())


@pytest.mark.network
def test_smollm2_chat_tokens_are_the_published_ones(smollm2: Tokenizer) -> None:
    """As the original tokenizer gives them: published in the documentation of several projects that serve the model."""
    for text, ids in (
        ("hello world", [28120, 905]),
        ("Hi there", [26843, 665]),
        ("Hello", [19556]),
        ("What is the capital of France?", [1780, 314, 260, 3575, 282, 4649, 47]),
    ):
        expected = [*CHAT, 1, 4093, 198, *ids, 2, 198, 1, 520, 9531, 198]
        assert smollm2.apply_chat_template([{"role": "user", "content": text}]) == expected


@pytest.mark.network
def test_smollm2_cuts_digits_one_by_one_and_adds_no_bos(smollm2: Tokenizer) -> None:
    pieces = [smollm2.decode([i]) for i in smollm2.encode("In 2024, x12.5")]
    assert pieces == ["In", " ", "2", "0", "2", "4", ",", " x", "1", "2", ".", "5"]
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.vocab_size) == (1, (2,), 49152)


@pytest.mark.network
@given(text=st.text(max_size=60))
def test_text_survives_smollm2(text: str, smollm2: Tokenizer) -> None:
    assume(not UNSPELLABLE & set(text.encode()))
    ids = smollm2.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert streamed(smollm2, ids, skip=False) == text


@pytest.mark.network
@given(ids=st.lists(st.one_of(st.integers(0, 49200), st.integers(0, 300)), max_size=20), skip=st.booleans())
def test_a_smollm2_stream_adds_up_to_the_whole(ids: list[int], skip: bool, smollm2: Tokenizer) -> None:
    assert streamed(smollm2, ids, skip) == smollm2.decode(ids, skip)


def test_a_tokenizer_larger_than_the_embedding_is_refused_and_added_tokens_are_not_counted(tmp_path: Path) -> None:
    """Gemma 3's tokenizer adds an image token that the text model has no embedding for."""
    fitting = saved(make_reference(num_hidden_layers=1, vocab_size=256, eos_token_id=2), tmp_path / "fitting")
    write_directory(fitting, adds_bos=False, config={})  # 256 bytes, and two tokens added
    assert load_tokenizer(resolve_model(str(fitting))).vocab_size == 258
    small = saved(make_reference(num_hidden_layers=1, vocab_size=255, eos_token_id=2), tmp_path / "small")
    write_directory(small, adds_bos=False, config={})
    with pytest.raises(LoadError, match="the tokenizer has 256 tokens and the model embeddings for 255: they do not"):
        load_tokenizer(resolve_model(str(small)))

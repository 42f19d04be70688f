"""`research-engine chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

import tyro

from research_engine.chat_backends import ChatBackend, ChatError, HttpChat, LocalChat

DEFAULT_URL = "http://127.0.0.1:8000"
HELP = """\
/reset            forget the conversation
/system TEXT      another system prompt, and a new conversation; without TEXT none
/retry            answer the last message again
/save FILE        write the conversation as JSON
/load FILE        go on with one that was saved
/quit             end; so does Ctrl-D
\"\"\"               begins and ends a message of several lines
Ctrl-C            stops an answer"""
# What a terminal takes for a command: control characters other than tab and line feed.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class ChatOptions:
    """Whom to talk to, and how.

    Args:
        model: loaded in this process; with base_url the name of a model there.
        base_url: of a server (alias: url); http://127.0.0.1:8000 when there is no model either.
        api_key: for the server; OPENAI_API_KEY when None.
        system_prompt: what the model is told beforehand.
        quick: ask this one thing, print the answer, end (-q).
        temperature: of sampling; the server's own when None, 1 in this process.
        top_p: of sampling.
        max_tokens: of an answer; as many as fit when None.
        seed: of sampling.
        engine: options of the engine in this process, like dtype=bfloat16 max_model_len=2048.
    """

    model: Annotated[str | None, tyro.conf.Positional] = None
    base_url: Annotated[str | None, tyro.conf.arg(aliases=("--url",))] = None
    api_key: str | None = None
    system_prompt: str | None = None
    quick: Annotated[str | None, tyro.conf.arg(aliases=("-q",))] = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    engine: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """What was said of sampling."""
        names = ("temperature", "top_p", "max_tokens", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass
class Conversation:
    """The messages so far, the system prompt first."""

    system_prompt: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        self.messages.clear()
        if self.system_prompt:
            self.messages.append({"role": "system", "content": self.system_prompt})

    def __post_init__(self) -> None:
        if not self.messages:
            self.reset()

    def last_question(self) -> str | None:
        """Takes the last question and what followed it out; None where there is none."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                question = self.messages[index]["content"]
                del self.messages[index:]
                return question
        return None

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Raises ValueError: the file holds no conversation."""
        messages = json.loads(path.read_text(encoding="utf-8"))
        fine = isinstance(messages, list) and all(map(_is_message, messages))
        if not fine:
            raise ValueError("it must be a list of messages with role and content")
        first = messages[0] if messages else {}
        return cls(first["content"] if first.get("role") == "system" else None, messages)


def _is_message(value: object) -> bool:
    is_one = isinstance(value, dict) and value.keys() == {"role", "content"}
    return is_one and all(isinstance(text, str) for text in value.values())  # type: ignore[attr-defined]


def main(options: Annotated[ChatOptions, tyro.conf.arg(name="")]) -> int:
    """Talk to a model: of a server, or in this process when it is named and no server is.

    Args:
        options: whom to talk to, and how.
    """
    backend = make_backend(options)
    try:
        chat = Chat(backend, Conversation(options.system_prompt), sys.stdin, sys.stdout)
        return chat.ask_once(options.quick) if options.quick is not None else chat.run()
    finally:
        backend.close()


def make_backend(options: ChatOptions) -> ChatBackend:
    """Raises ValueError: the server does not answer, or the model or an option cannot be had."""
    if options.model is None or options.base_url is not None:
        if options.engine:
            raise ValueError("engine: its options are those of a model in this process; a server has its own")
        key = options.api_key or os.environ.get("OPENAI_API_KEY")
        return HttpChat(options.base_url or DEFAULT_URL, options.model, key, options.settings)
    from research_engine.llm import LLM

    return LocalChat(LLM(options.model, **engine_options(options.engine)), options.settings)


def engine_options(words: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE words; values are JSON where they can be (8, 0.5, true), else texts."""
    out: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise ValueError(f"engine {word!r}: must be KEY=VALUE")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out


class Chat:
    """Reads messages and commands, writes answers.

    Args:
        backend: who answers.
        conversation: begun or empty.
        source, sink: where messages come from and answers go to; a terminal gets prompts and times, a pipe answers
            alone.
    """

    def __init__(self, backend: ChatBackend, conversation: Conversation, source: TextIO, sink: TextIO) -> None:
        self._backend, self.conversation = backend, conversation
        self._source, self._sink = source, sink
        self._interactive = source.isatty() and sink.isatty()
        self._failed = False

    def run(self) -> int:
        """Until the end of the input or /quit. Exit code 1 when an answer of a pipe failed."""
        if self._interactive:
            import readline  # noqa: F401  # input() edits lines and remembers them with it

            self._say(f"{self._backend.name}: /help lists the commands")
        for message in self._messages():
            if message.startswith("/"):
                if not self._command(message):
                    break
            elif message.strip():
                self._turn(message)
            if self._failed and not self._interactive:
                break
        return 1 if self._failed and not self._interactive else 0

    def ask_once(self, question: str) -> int:
        """One question and its answer."""
        self._turn(question)
        return 1 if self._failed else 0

    def _messages(self) -> Iterator[str]:
        while True:
            line = self._line("> ")
            if line is None:
                return
            if line.startswith('"""'):
                parts, line = [line[3:]], ""
                while not parts[-1].rstrip().endswith('"""'):
                    more = self._line(". ")
                    if more is None:
                        break
                    parts.append(more)
                line = "\n".join(parts).strip().removesuffix('"""').strip("\n")
            yield line

    def _line(self, prompt: str) -> str | None:
        """The next line without its end; None when there is no more."""
        if not self._interactive:
            line = self._source.readline()
            return line.rstrip("\r\n") if line else None
        while True:
            try:
                return input(prompt)
            except EOFError:
                self._sink.write("\n")
                return None
            except KeyboardInterrupt:
                self._say("\n(Ctrl-D or /quit ends)")

    def _turn(self, question: str) -> None:
        """Ask, show the answer as it comes, remember both; a question without an answer is forgotten again."""
        messages = self.conversation.messages
        messages.append({"role": "user", "content": question})
        parts: list[str] = []
        try:
            with closing(self._backend.answer(messages)) as pieces:
                for piece in pieces:
                    parts.append(piece)
                    self._sink.write(_CONTROL.sub("", piece) if self._sink.isatty() else piece)
                    self._sink.flush()
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._say("\n(stopped)", end="")
        except ChatError as error:
            self._failed = True
            print(f"research-engine chat: {error}", file=sys.stderr, flush=True)
            if not parts:
                messages.pop()
                return
        self._sink.write("\n")
        self._sink.flush()
        messages.append({"role": "assistant", "content": "".join(parts)})
        if self._interactive and self._backend.answered.line:
            self._say(f"\x1b[2m({self._backend.answered.line})\x1b[0m")

    def _command(self, line: str) -> bool:
        """Carries it out; False when it ends the chat."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name in ("/quit", "/exit", "/bye"):
            return False
        if name == "/help":
            self._say(HELP)
        elif name == "/reset":
            self.conversation.reset()
            self._say("(a new conversation)")
        elif name == "/system":
            self.conversation.system_prompt = rest or None
            self.conversation.reset()
            self._say("(a new conversation)")
        elif name == "/retry":
            question = self.conversation.last_question()
            if question is None:
                self._complain("/retry: there is no message yet")
            else:
                self._turn(question)
        elif name in ("/save", "/load"):
            self._file(name, rest)
        else:
            self._complain(f"no command {name}; /help lists them")
        return True

    def _file(self, name: str, rest: str) -> None:
        if not rest:
            self._complain(f"{name} FILE: which file?")
            return
        path = Path(rest).expanduser()
        try:
            if name == "/save":
                self.conversation.save(path)
            else:
                self.conversation = Conversation.load(path)
        except (OSError, ValueError) as error:
            self._complain(f"{name} {rest}: {error}")
            return
        self._say(f"({len(self.conversation.messages)} messages)")

    def _say(self, text: str, end: str = "\n") -> None:
        """For a person; a pipe gets answers alone."""
        if self._interactive:
            self._sink.write(text + end)
            self._sink.flush()

    def _complain(self, text: str) -> None:
        self._failed = True
        print(f"research-engine chat: {text}", file=sys.stderr, flush=True)

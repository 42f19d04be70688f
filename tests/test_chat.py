"""research-engine chat: a conversation through a pipe and in a pseudo-terminal, with a server and in one process."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from research_engine import chat as chat_module
from research_engine.chat import Chat, ChatOptions, Conversation, engine_options
from research_engine.chat_backends import Answered, ChatError, HttpChat
from research_engine.cli import main
from tests.bench.standin import Reply, StandIn

ROOT = Path(__file__).resolve().parents[1]


class Echo:
    """Answers with the number of messages it was given, in pieces."""

    name = "echo"

    def __init__(self, fail_at: int | None = None) -> None:
        self.answered, self.asked, self._fail_at = Answered(), [], fail_at

    def answer(self, messages):
        self.asked.append([dict(message) for message in messages])
        yield "you sent "
        if self._fail_at == len(self.asked):
            raise ChatError("it broke")
        yield str(len(messages))

    def close(self):
        pass


def talk(text: str, backend=None, system: str | None = None):
    backend, sink = backend or Echo(), io.StringIO()
    chat = Chat(backend, Conversation(system), io.StringIO(text), sink)
    return chat.run(), sink.getvalue(), backend, chat


def test_a_pipe_gets_the_answers_alone_each_knowing_the_turns_before():
    code, out, backend, _ = talk("one\ntwo\n\nthree")
    assert (code, out) == (0, "you sent 1\nyou sent 3\nyou sent 5\n")
    assert [message["role"] for message in backend.asked[1]] == ["user", "assistant", "user"]
    assert backend.asked[1][1]["content"] == "you sent 1"


def test_the_system_prompt_comes_first_and_outlives_a_reset():
    _, out, backend, _ = talk("one\n/reset\ntwo\n/system be brief\nthree\n/system\nfour\n", system="be kind")
    assert out.split("\n")[:-1] == ["you sent 2", "you sent 2", "you sent 2", "you sent 1"]
    assert [asked[0]["content"] for asked in backend.asked] == ["be kind", "be kind", "be brief", "four"]


def test_a_message_of_several_lines():
    _, _, backend, _ = talk('"""first\nsecond\n"""\n"""\nthird"""\n')
    assert [asked[-1]["content"] for asked in backend.asked] == ["first\nsecond", "third"]


def test_retry_asks_the_last_message_again():
    _, out, backend, chat = talk("one\n/retry\n")
    assert backend.asked[0] == backend.asked[1] and out.count("you sent 1") == 2
    assert len(chat.conversation.messages) == 2


def test_quit_ends_before_the_rest():
    assert talk("one\n/quit\ntwo\n")[1] == "you sent 1\n"


def test_a_conversation_is_saved_and_gone_on_with(tmp_path):
    path = tmp_path / "talk.json"
    talk(f"one\n/save {path}\n", system="be kind")
    _, out, backend, _ = talk(f"/load {path}\ntwo\n/reset\nthree\n")
    assert out == "you sent 4\nyou sent 2\n"
    assert backend.asked[1][0] == {"role": "system", "content": "be kind"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [("/save", "which file"), ("/load nowhere.json", "No such file"), ("/what", "no command /what"),
     ("/retry", "no message yet"), ("/save /nowhere/x.json", "No such file")],
)  # fmt: skip
def test_a_wrong_command_in_a_pipe_ends_it_with_an_error(line, reason, capsys):
    code, out, _, _ = talk(f"{line}\none\n")
    assert code == 1 and out == "" and reason in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"role": "user"}]', '[{"role": "user", "content": 1}]', "x"])
def test_a_file_that_is_no_conversation_is_refused(text, tmp_path, capsys):
    path = tmp_path / "talk.json"
    path.write_text(text)
    assert talk(f"/load {path}\n")[0] == 1
    assert "talk.json" in capsys.readouterr().err


def test_an_answer_that_breaks_off_is_told_and_ends_a_pipe(capsys):
    code, out, _, _ = talk("one\ntwo\n", Echo(fail_at=1))
    assert (code, out) == (1, "you sent \n") and "it broke" in capsys.readouterr().err


def test_options_of_the_engine():
    assert engine_options(("a=1", "b=0.5", "c=true", "d=bfloat16", "e=x=y")) == {
        "a": 1, "b": 0.5, "c": True, "d": "bfloat16", "e": "x=y",
    }  # fmt: skip
    with pytest.raises(ValueError, match="KEY=VALUE"):
        engine_options(("a",))
    with pytest.raises(ValueError, match="a server has its own"):
        chat_module.make_backend(ChatOptions(engine=("a=1",)))


# over HTTP


def ask(server: StandIn, *messages: str, **settings) -> str:
    backend = HttpChat(server.url, None, server.key, settings)
    return "".join(backend.answer([{"role": "user", "content": message} for message in messages]))


def test_a_server_is_asked_with_the_settings_and_answers_piece_by_piece():
    with StandIn(lambda body, index: Reply(chunks=["Hel", "lo"], tokens=9, finish_reason="stop")) as server:
        backend = HttpChat(server.url + "/v1", None, None, {"temperature": 0.0, "max_tokens": 5})
        assert list(backend.answer([{"role": "user", "content": "hi"}])) == ["Hel", "lo"]
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("dummy:tiny", 0.0, 5)
    assert backend.answered.tokens == 9 and backend.answered.finish_reason == "stop"
    assert backend.answered.first_after is not None and "9 tokens" in backend.answered.line


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(status=503), "HTTP 503: refused by the script"),
        (Reply.of(4, cut_after=2), "broke off"),
        (Reply.of(4, event=b'data: {"error": {"message": "boom"}}\n\n'), "the server failed: boom"),
        (Reply.of(4, event=b"data: <p>\n\n"), "something else than an answer"),
        (Reply.of(4, finish=False), "without saying why"),
    ],
)
def test_whatever_a_server_does_is_told(reply, reason):
    with StandIn(lambda body, index: reply) as server, pytest.raises(ChatError, match=reason):
        ask(server, "hi")


def test_a_key_is_sent_and_its_absence_is_told():
    with StandIn(key="secret") as server:
        assert ask(server, "hi") == "x x x x "
        with pytest.raises(ChatError, match="give the key in OPENAI_API_KEY"):
            HttpChat(server.url, None, None, {})


@pytest.mark.parametrize("url", ["nowhere", "http://127.0.0.1:1", "ftp://x"])
def test_no_server_is_a_users_mistake(url, capsys):
    assert main(["chat", "--base-url", url]) == 2
    assert "research-engine chat: " in capsys.readouterr().err


def test_one_question_from_the_command_line(capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with StandIn(lambda body, index: Reply(chunks=["Par", "is"], finish_reason="stop")) as server:
        assert main(["chat", "--url", server.url, "-q", "capital of France?", "--system-prompt", "brief"]) == 0
    assert capsys.readouterr().out == "Paris\n"
    assert [message["role"] for message in server.bodies[0]["messages"]] == ["system", "user"]


# in this process


def test_a_model_in_this_process_answers_the_same_over_turns(capsys, monkeypatch):
    outs = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n"))
        assert main(["chat", "dummy:tiny", "--max-tokens", "8", "--seed", "3", "--engine", "device=cpu"]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] and outs[0].count("\n") >= 2


def test_a_conversation_that_is_too_long_for_the_model_is_told(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 300 + "\n"))
    assert main(["chat", "dummy:tiny", "--engine", "device=cpu", "max_model_len=128"]) == 1
    assert "128" in capsys.readouterr().err


def test_an_answer_given_up_leaves_the_engine_without_it():
    from research_engine.chat_backends import LocalChat
    from research_engine.llm import LLM

    llm = LLM("dummy:tiny", device="cpu")
    backend = LocalChat(llm, {"ignore_eos": True, "max_tokens": 50})
    pieces = backend.answer([{"role": "user", "content": "hi"}])
    next(pieces)
    pieces.close()
    assert not llm.engine.has_unfinished
    assert sum(map(len, backend.answer([{"role": "user", "content": "hi"}]))) > 0
    with pytest.raises(ChatError, match="temperature"):
        LocalChat(llm, {"temperature": -1})
    backend.close()


# in a terminal


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
        environment.pop("OPENAI_API_KEY", None)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str) -> None:
        """Reads until the text comes, from where the last one ended."""
        deadline = time.monotonic() + 60
        while text not in self.seen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come, but: {self.seen!r}"
            try:
                self.seen += os.read(self._master, 65_536).decode(errors="replace")
            except OSError as error:  # the program has ended
                raise AssertionError(f"{text!r} did not come, but: {self.seen!r}") from error
        self.seen = self.seen.partition(text)[2]

    def close(self) -> int:
        code = self.process.wait(60)
        os.close(self._master)
        return code


@pytest.mark.timeout(180)
def test_in_a_terminal_answers_stream_stop_at_ctrl_c_and_the_chat_goes_on():
    never = threading.Event()

    def script(body, index):
        if index == 1:
            return Reply(chunks=["endless"], gaps=[0.0, 600.0], until=never)
        return Reply(chunks=["good", " day\x1b[31m"], finish_reason="stop")

    with StandIn(script) as server:
        terminal = Terminal(sys.executable, "-m", "research_engine.cli", "chat", "--base-url", server.url)
        terminal.expect("/help lists the commands")
        terminal.expect("> ")
        terminal.type("hello\n")
        terminal.expect("good day[31m")  # without the escape that would colour the terminal
        terminal.expect("2 tokens")
        terminal.expect("> ")
        terminal.type("go on\n")
        while len(server.bodies) < 2:
            time.sleep(0.01)
        terminal.type("\x03")
        terminal.expect("(stopped)")
        terminal.expect("> ")
        terminal.type("\x03")
        terminal.expect("Ctrl-D or /quit")
        terminal.type("/nonsense\n")
        terminal.expect("no command /nonsense")
        terminal.type("still there?\n")
        terminal.expect("good day")
        terminal.type("/quit\n")
        assert terminal.close() == 0
        never.set()
    assert [message["role"] for message in server.bodies[2]["messages"]] == ["user", "assistant"] * 2 + ["user"]

"""Servers in processes of their own, for tests that are their clients."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 120.0  # seconds for anything that must happen; a loaded machine is slow, and nothing waits this long in vain
STUB = ("research_engine.server.stub_engine:stub_parts", "research_engine.server.stub_engine:stub_tokenizer")

NOTHING = ("running", "waiting", "unanswered", "kv_utilization")  # of /stats, when all is quiet


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after a look at its shape."""
        (error,) = self.json().values()
        assert set(error) == {"message", "type", "param", "code"}
        return error


@dataclass
class LiveServer:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def engine_pid(self) -> int:
        """The process id of the engine, a child of the server's."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError("there is no engine process")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = self.connect()
        try:
            sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            usual = {} if body is None else {"content-type": "application/json"}
            connection.request(method, path, sent, {**usual, **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        return self.request("POST", path, body, headers)

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        answer = self.post("/v1/completions", fields)
        assert answer.status == 200, answer.body
        return answer.json()

    def chat(self, content: str = "hi", **fields: Any) -> dict[str, Any]:
        """An answer that must succeed."""
        answer = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})
        assert answer.status == 200, answer.body
        return answer.json()

    def send(self, *, receive_buffer: int = 0, headers: dict[str, str] | None = None, **fields: Any) -> socket.socket:
        """A completion under way; the connection can be read, left unread or closed."""
        body = json.dumps({"prompt": "a", "max_tokens": 8000, **fields}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        connection = socket.socket()
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(DEADLINE)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        return connection

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream that must succeed, without the [DONE] that must end it."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.body.decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        assert all(line.startswith("data: ") for line in lines)
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def wait_until(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The stats, once they are as wanted."""
        end = time.monotonic() + DEADLINE
        while not what(stats := self.get("/stats?since=1000000000").json()):
            assert time.monotonic() < end, f"never so: {stats}"
            time.sleep(0.02)
        return stats

    def wait_until_quiet(self) -> None:
        """Until it serves nobody, holds no block and owes no answer; fails where that never comes."""
        self.wait_until(lambda stats: not any(stats[name] for name in NOTHING))

    def stop(self) -> int:
        """End it as an orchestrator does; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(DEADLINE)
        finally:
            if self.process.poll() is None:
                self.process.kill()


def start(
    log: Path, *flags: str, engine: tuple[str, str] | None = None, mute: bool = False, **environment: str
) -> LiveServer:
    """Start a server on a free port and wait until it serves.

    Args:
        engine: names of the functions that make its engine and tokenizer; the real ones when None.
        mute: with standard error closed.
    """
    process = launch(log, *flags, engine=engine, mute=mute, **environment)
    assert process.stdout is not None
    end = time.monotonic() + DEADLINE
    while True:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        line = process.stdout.readline() if ready else ""
        if line.startswith("serving "):
            return LiveServer(process, line.split(" on ")[1].strip(), log)
        if not line:
            process.kill()
            raise AssertionError(f"the server did not start:\n{log.read_text()}")


def launch(
    log: Path, *flags: str, engine: tuple[str, str] | None = None, mute: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """Start a server; it may or may not come to serve."""
    command = ["research_engine.cli", "serve"] if engine is None else ["tests.server.run_server", *engine]
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh"] if mute else []
    return subprocess.Popen(
        [*shell, sys.executable, "-m", *command, "--port", "0", "--config-dir", str(log.parent / "configs"), *flags],
        stdout=subprocess.PIPE, stderr=log.open("w"), text=True, cwd=ROOT, env=known,
    )  # fmt: skip

"""An engine that fails: its requests get an error, and what can go on goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.faulty import FAULTY, JUMPING, SLOW
from tests.server.live import DEADLINE, LiveServer, start

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("faulty") / "log"
    live = start(log, "faulty", engine=FAULTY)
    yield live
    live.wait_until_quiet()
    assert live.stop() == 0, log.read_text()


@pytest.mark.parametrize("letter", ["O", "N"], ids=["out of memory", "no numbers"])
def test_a_batch_that_fails_is_told_and_the_next_one_is_served(faulty: LiveServer, letter: str) -> None:
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(faulty.post, TEXT, {"prompt": "a", "max_tokens": 8000, "stream": True})
        faulty.wait_until(lambda stats: stats["running"] == 1)
        answer = faulty.post(TEXT, {"prompt": letter, "max_tokens": 5})
        *_, last, _, _ = beside.result(DEADLINE).body.split(b"\n\n")
    for error in (answer.error, json.loads(last.removeprefix(b"data: "))["error"]):
        assert error["code"] == "engine_error" and error["type"] == "server_error"
        assert "secret" not in error["message"] and "Traceback" not in error["message"]
    assert answer.status == 500
    assert faulty.complete(prompt="a", max_tokens=3)["choices"][0]["text"] == "abc"
    faulty.wait_until_quiet()
    assert "Traceback" in faulty.log.read_text()  # the server's log has what the client is not told


@pytest.mark.parametrize(("letter", "status"), [("C", 500), ("K", 503)], ids=["CUDA error", "killed"])
def test_an_engine_that_is_lost_ends_the_server_with_an_error(tmp_path: Path, letter: str, status: int) -> None:
    server = start(tmp_path / "log", "faulty", engine=FAULTY)
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(server.post, TEXT, {"prompt": "a", "max_tokens": 8000, "stream": True})
        server.wait_until(lambda stats: stats["running"] == 1)
        answer = server.post(TEXT, {"prompt": letter, "max_tokens": 5})
        assert answer.status == status, answer.body
        *_, last, done, _ = beside.result(DEADLINE).body.split(b"\n\n")
    assert "error" in json.loads(last.removeprefix(b"data: ")) and done == b"data: [DONE]"
    assert server.process.wait(DEADLINE) == 1


def test_an_engine_that_is_killed_is_started_again_where_that_is_wanted(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "slow", "--restart-engine", "1", engine=SLOW)
    with ThreadPoolExecutor() as pool:
        lost = pool.submit(server.post, TEXT, {"prompt": "a", "max_tokens": 8000})
        server.wait_until(lambda stats: stats["running"] == 1)
        os.kill(server.engine_pid, signal.SIGKILL)
        answer = lost.result(DEADLINE)
        assert (answer.status, answer.error["code"]) == (503, "engine_dead")
        assert answer.headers["retry-after"]
    while (health := server.get("/health")).status != 200:
        assert health.status == 503
        refused = server.post(TEXT, {"prompt": "a", "max_tokens": 1})
        assert refused.status in (200, 503)
    assert server.complete(prompt="a", max_tokens=3)["choices"][0]["text"] == "abc"
    assert server.stop() == 0


def test_the_engine_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "slow", engine=SLOW)
    engine = os.pidfd_open(server.engine_pid)
    server.process.kill()
    server.process.wait(DEADLINE)
    signalled = select_readable(engine)
    os.close(engine)
    assert signalled


def select_readable(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], DEADLINE)[0])


def test_a_clock_that_jumps_harms_nobody(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "jumping", engine=JUMPING)
    for _ in range(3):
        assert server.complete(prompt="a", max_tokens=10)["usage"]["completion_tokens"] == 10
    metrics = server.get("/metrics").body.decode()
    sums = [float(line.rpartition(" ")[2]) for line in metrics.splitlines() if "_sum{" in line]
    assert sums and min(sums) >= 0
    assert server.stop() == 0


def test_options_that_cannot_be_written_do_not_stop_the_server(tmp_path: Path) -> None:
    blocked = tmp_path / "configs"
    blocked.write_text("a file where a directory is wanted")
    server = start(tmp_path / "log", "slow", engine=SLOW)
    assert server.complete(prompt="a", max_tokens=1)
    assert "are not written" in server.log.read_text()
    assert server.stop() == 0

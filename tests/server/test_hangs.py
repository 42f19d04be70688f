"""An engine process that hangs, in its policy or on its device, is ended, and everybody learns of it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from research_engine.engine.sampling_params import SamplingParams
from research_engine.options import EngineOptions
from research_engine.server.engine_client import LOOKS, EngineClient, Generation, Silence
from research_engine.server.engine_process import EngineLoop
from research_engine.server.engine_source import EngineSource
from research_engine.server.live_records import LiveRecords
from research_engine.server.stub_engine import stub_parts
from research_engine.server.wire import Add, EngineEnd, encode_sampling, frame, frames
from tests.server.faulty import FAULTY
from tests.server.live import DEADLINE, STUB, start

TEXT = "/v1/completions"
NEVER_DECIDES = ("--scheduler", str(Path(__file__).with_name("faulty.py")) + ":NeverDecides")


@pytest.mark.parametrize(
    ("flags", "prompt", "where"), [((), "H", "in execute"), (NEVER_DECIDES, "a", "in schedule")], ids=["step", "policy"]
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_hang_is_told_and_ends_the_server_with_1(
    tmp_path: Path, flags: tuple[str, ...], prompt: str, where: str, stream: bool
) -> None:
    server = start(tmp_path / "log", "faulty", "--step-timeout", "0.5", *flags, engine=FAULTY)
    answer = server.post(TEXT, {"prompt": prompt, "max_tokens": 5, "stream": stream})
    assert (answer.status, answer.error["code"]) == (503, "engine_dead")
    assert "a step did not end within 0.5 s (step_timeout)" in answer.error["message"]
    assert server.process.wait(DEADLINE) == 1
    log = server.log.read_text()
    assert where in log and "faulty.py" in log  # the line where it hangs, for the person who wrote it


def test_an_engine_that_hangs_is_started_again_where_that_is_wanted(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "faulty", "--step-timeout", "0.5", "--restart-engine", "1", engine=FAULTY)
    first = server.engine_pid
    assert server.post(TEXT, {"prompt": "H"}).error["code"] == "engine_dead"
    while (health := server.get("/health")).status != 200:
        assert health.status == 503
    assert server.engine_pid != first
    assert server.stop() == 0


WAITS_FOR_TWO = str(Path(__file__).with_name("faulty.py")) + ":WaitsForTwo"


def test_a_policy_that_waits_is_asked_again_when_a_request_comes(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "stub", "--scheduler", WAITS_FOR_TWO, engine=STUB)
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(server.complete, prompt="a", max_tokens=3)
        server.wait_until(lambda stats: stats["waiting"] == 1)
        assert server.complete(prompt="b", max_tokens=3)["choices"][0]["text"] == "abc"
        assert alone.result(DEADLINE)["choices"][0]["text"] == "abc"
    assert server.stop() == 0


def test_an_engine_whose_policy_waits_goes_on_speaking() -> None:
    ours, theirs = socket.socketpair()
    records = LiveRecords()
    loop = EngineLoop(stub_parts(EngineOptions("stub", scheduler=WAITS_FOR_TWO), records), records, EngineEnd(theirs))

    def run() -> None:
        with suppress(EOFError):
            loop.run()

    thread = threading.Thread(target=run)
    thread.start()
    ours.settimeout(DEADLINE)
    ours.sendall(frame(Add(0, "a", [1, 2], encode_sampling(SamplingParams(max_tokens=1)), False, 0.0)))
    inbox = bytearray()
    for request in (None, Add(1, "b", [10**6], encode_sampling(SamplingParams()), False, 0.0)):  # the second is refused
        if request is not None:
            ours.sendall(frame(request))
        heard = 0
        while heard < 3:
            inbox += ours.recv(65536)
            heard += sum(1 for _ in frames(inbox))
    ours.close()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def test_silence_is_too_long_only_when_answers_are_owed_and_nothing_comes() -> None:
    silence = Silence()
    assert not any(silence.is_too_long(0, owes=False) for _ in range(3 * LOOKS))
    assert not any(silence.is_too_long(count, owes=True) for count in range(1, 3 * LOOKS))
    assert not any(silence.is_too_long(7, owes=True) for _ in range(LOOKS + 1))  # the first of them heard something
    assert not silence.is_too_long(7, owes=False)
    assert [silence.is_too_long(7, owes=True) for _ in range(LOOKS + 1)] == [False] * LOOKS + [True]


def test_an_engine_without_work_is_not_taken_for_hung_whatever_is_thought_to_be_owed() -> None:
    async def watch() -> None:
        client: Any = EngineClient(EngineSource(EngineOptions("stub"), *STUB), step_timeout=8.0)
        await client.start()
        client._live[99] = Generation(client, range(99, 100), 1)  # which the engine knows nothing of
        heard, end = client._messages, time.monotonic() + DEADLINE
        while client._messages < heard + 2:
            assert client.is_alive and time.monotonic() < end
            await asyncio.sleep(0.05)
        await client.close()

    asyncio.run(watch())


class Unkillable:
    """A process that a driver holds."""

    pid, exitcode, kills = 1, None, 0

    def kill(self) -> None:
        self.kills += 1


def test_a_process_that_cannot_be_killed_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    client: Any = EngineClient(EngineSource(EngineOptions("stub")))
    client._process = Unkillable()
    asyncio.run(client.close(patience=0.0))
    assert client.is_stuck and client._process.kills == 1
    assert "cannot be killed" in caplog.text

"""Requests and the server end as they should: disconnects, full queues, slow readers, signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from research_engine.server.serve import _bind, _listen
from research_engine.server.serve_options import ServerOptions
from tests.server.faulty import BROKEN, MISTAKEN, SLOW
from tests.server.live import DEADLINE, STUB, LiveServer, launch, start

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """20 ms a step, four requests at once, two in the queue."""
    log = tmp_path_factory.mktemp("slow") / "log"
    live = start(log, "slow", "--max-num-seqs", "4", "--max-num-queued-reqs", "2", engine=SLOW)
    yield live
    live.wait_until_quiet()
    assert live.stop() == 0, log.read_text()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_takes_its_request_with_it(slow: LiveServer, streamed: bool) -> None:
    connection = slow.send(stream=streamed, n=2)
    slow.wait_until(lambda stats: stats["running"] == 2)
    connection.close()
    slow.wait_until_quiet()


def test_beyond_the_queues_limit_a_request_is_refused_at_once_and_told_when_to_return(slow: LiveServer) -> None:
    held = []
    for number in range(1, 5):  # one by one: those that come between two steps all wait
        held.append(slow.send(stream=number % 2 == 0))
        slow.wait_until(lambda stats, number=number: stats["running"] == number)
    held += [slow.send() for _ in range(2)]
    slow.wait_until(lambda stats: stats["waiting"] == 2)
    for streamed in (False, True):
        answer = slow.post(TEXT, {"prompt": "a", "stream": streamed})
        assert (answer.status, answer.error["code"]) == (503, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
    for connection in held:
        connection.close()
    slow.wait_until_quiet()
    assert slow.complete(prompt="a", max_tokens=2)["choices"][0]["text"] == "ab"


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while b"data: [DONE]" not in received:
        piece = connection.recv(1 << 16)
        assert piece, "the answer was cut"
        received += piece
    return received


def test_readers_that_do_not_read_delay_nobody_and_get_whole_answers_later(stub: LiveServer) -> None:
    readers = [stub.send(receive_buffer=4096, max_tokens=2000, stream=True) for _ in range(4)]
    assert stub.complete(prompt="a", max_tokens=5)["choices"][0]["text"] == "abcde"
    stub.wait_until(lambda stats: stats["running"] == 0)  # the engine has long finished what they have not read
    for connection in readers:
        events = [line for line in read_all(connection).split(b"\n") if line.startswith(b"data: {")]
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in events)
        assert text == ("abcdefghijklmnopqrstuvwxyz" * 80)[:2000]
        connection.close()


def test_a_client_that_never_reads_is_cut(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "stub", "--client-timeout", "0.5", engine=STUB)
    echoed = ["x" * 8000] * 300  # an answer of 2.4 MB, more than any buffer between the two holds
    connection = server.send(receive_buffer=4096, prompt=echoed, echo=True, max_tokens=1)
    end = time.monotonic() + DEADLINE
    while "has not read" not in server.log.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    received = 0
    try:
        while piece := connection.recv(1 << 16):
            received += len(piece)
    except ConnectionResetError:
        pass
    assert received < 2_400_000
    connection.close()
    assert server.stop() == 0


def test_a_signal_lets_running_requests_end_and_the_exit_code_is_0(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "slow", engine=SLOW)
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(server.complete, prompt="a", max_tokens=40)
        events = pool.submit(server.events, TEXT, {"prompt": "a", "max_tokens": 40})
        server.wait_until(lambda stats: stats["running"] == 2)
        server.process.send_signal(signal.SIGTERM)
        assert whole.result(DEADLINE)["usage"]["completion_tokens"] == 40
        assert events.result(DEADLINE)[-1]["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(DEADLINE) == 0
    with pytest.raises(ConnectionRefusedError):
        server.get("/health")


def test_a_signal_to_all_processes_of_the_server_lets_running_requests_end_too(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "slow", engine=SLOW)
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(server.complete, prompt="a", max_tokens=40)
        server.wait_until(lambda stats: stats["running"] == 1)
        os.kill(server.engine_pid, signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        assert whole.result(DEADLINE)["usage"]["completion_tokens"] == 40
    assert server.process.wait(DEADLINE) == 0


def test_what_runs_beyond_the_limit_ends_with_an_error_and_the_exit_code_is_0(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "slow", "--shutdown-timeout", "0.2", engine=SLOW)
    with ThreadPoolExecutor() as pool:
        whole = pool.submit(server.post, TEXT, {"prompt": "a", "max_tokens": 8000})
        streamed = pool.submit(server.post, TEXT, {"prompt": "a", "max_tokens": 8000, "stream": True})
        server.wait_until(lambda stats: stats["running"] == 2)
        server.process.send_signal(signal.SIGINT)
        answer = whole.result(DEADLINE)
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
        *_, last, done, _ = streamed.result(DEADLINE).body.split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert done == b"data: [DONE]"
    assert server.process.wait(DEADLINE) == 0


def test_an_engine_that_cannot_start_ends_the_server_with_1_and_a_users_mistake_with_2(tmp_path: Path) -> None:
    for engine, code, says in ((BROKEN, 1, "the device is lost"), (MISTAKEN, 2, "num_blocks = 3: must be more")):
        process = launch(tmp_path / "log", "x", engine=engine)
        assert process.wait(DEADLINE) == code
        assert says in (tmp_path / "log").read_text()


def test_a_server_whose_standard_error_is_closed_serves_all_the_same(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "stub", engine=STUB, mute=True)
    os.kill(server.engine_pid, signal.SIGUSR1)  # it tells nobody where it is, and goes on
    assert server.complete(prompt="a", max_tokens=3)["choices"][0]["text"] == "abc"
    assert server.stop() == 0


def test_a_port_in_use_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = launch(tmp_path / "log", "dummy:tiny", "--port", port)
        assert process.wait(DEADLINE) == 2
    told = f"port = {port}: cannot be listened on: another program has the port; --port takes another, 0 a free one"
    assert told in (tmp_path / "log").read_text()


def test_of_two_servers_that_load_at_once_the_second_is_refused_before_it_loads() -> None:
    with _bind(ServerOptions(port=0)) as loading, pytest.raises(ValueError, match="another program has the port"):
        _bind(ServerOptions(port=loading.getsockname()[1]))


def test_a_server_takes_the_port_of_one_whose_connections_are_still_closing() -> None:
    options = ServerOptions(port=0)
    with _bind(options) as first:
        _listen(first, options, 8)
        address = first.getsockname()
        with socket.create_connection(address, timeout=DEADLINE) as client:
            first.accept()[0].close()  # its end closes first and stays in TIME_WAIT
            assert client.recv(1) == b""
    again = ServerOptions(port=address[1])
    with _bind(again) as second:
        _listen(second, again, 8)


def test_a_port_that_somebody_takes_in_the_end_is_a_users_mistake() -> None:
    with socket.socket() as one, socket.socket() as other:
        for own in (one, other):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(one.getsockname() if own is other else ("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ValueError, match="another program has the port"):
            _listen(one, ServerOptions(port=other.getsockname()[1]), 8)


def test_many_at_once_all_get_their_own_answer(stub: LiveServer) -> None:
    lengths = list(range(1, 65))
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: stub.complete(prompt="a", max_tokens=n), lengths))
    alphabet = "abcdefghijklmnopqrstuvwxyz" * 3
    assert [answer["choices"][0]["text"] for answer in answers] == [alphabet[:n] for n in lengths]
    stub.wait_until_quiet()

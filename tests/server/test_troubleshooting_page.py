"""Every symptom that docs/troubleshooting.md quotes is provoked, and is what the program says."""

from __future__ import annotations

import importlib
import platform
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from research_engine import __version__, cli, kernels
from research_engine.kernels._extension import _Missing
from research_engine.options import EngineOptions, choose_device
from research_engine.server.engine_source import EngineSource
from research_engine.server.live_records import LiveRecords
from research_engine.server.serve import _bind
from research_engine.server.serve_options import ServerOptions
from tests.server.faulty import FAULTY, SLOW
from tests.server.live import DEADLINE, STUB, Answer, LiveServer, start

build_info_module = importlib.import_module("research_engine.kernels.build_info")  # the package has its function's name
PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
KEY = {"authorization": "Bearer secret"}
TEXT = "/v1/completions"
_PLACEHOLDER = re.compile(r"\\\.\\\.\\\.|\b(?:[XNMSy]|MODEL|NAME)\b")


def symptoms(section: str) -> list[str]:
    """First cells of the table below a heading."""
    (table,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")]
    return rows[1:]  # without the heading


def pattern(quoted: str) -> re.Pattern[str]:
    """A quoted message; X, N, M, y, MODEL, NAME and ... stand for anything."""
    return re.compile(_PLACEHOLDER.sub(".+", re.escape(quoted)).replace("\\ ", " "))


def quoted(symptom: str) -> list[str]:
    return re.findall(r"`([^`]+)`", symptom)


# What it says when it does not start.


def of_command(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What `serve` prints for a mistake that it finds before it starts an engine."""
    assert cli.main(["serve", *flags]) == 2
    return capsys.readouterr().err


def of_engine(**options: object) -> str:
    """What the engine process answers to its options; the server prints it and ends with 2."""
    with pytest.raises(ValueError) as refused:
        EngineSource(EngineOptions("dummy:tiny", device="cpu", **options)).build(LiveRecords())  # type: ignore[arg-type]
    return str(refused.value)


def port_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        return of_command(capsys, "dummy:tiny", "--port", str(taken.getsockname()[1]))


def wrong_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    path = tmp_path / "serve.yaml"
    path.write_text("max_num_seq: 3")
    return of_command(capsys, "dummy:tiny", "--config", str(path))


def no_device(monkeypatch: pytest.MonkeyPatch, devices: int, built: bool) -> str:
    """What a machine with that many GPUs is told, with kernels for them or without."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: devices > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    monkeypatch.setattr(kernels, "build_info", lambda: {"built_with_cuda": built})
    with pytest.raises(ValueError) as refused:
        choose_device("cuda")
    return str(refused.value)


def of_memory(capsys: pytest.CaptureFixture[str]) -> str:
    """What a GPU that is too small is told: the same words with and without one."""
    assert cli.main(["memory", "dummy:llama-3.1-8b", "--gpu-memory-gib", "16"]) == 2
    return capsys.readouterr().err


def test_remedies_against_too_little_memory_come_in_the_order_of_the_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    remedies = re.split(r"\(\d\) ", of_memory(capsys).partition("Try, in this order: ")[2])[1:]
    items = re.findall(r"^\d\. (.*(?:\n   .*)*)", PAGE, re.MULTILINE)
    assert len(items) == len(remedies)
    for item, remedy in zip(items, remedies, strict=True):
        for word in re.findall(r"[a-z]+(?:_[a-z]+)+", remedy):
            assert word.replace("_", "-") in item, (word, item)


def kv_room(capsys: pytest.CaptureFixture[str], *flags: str) -> int:
    """KV blocks that fit a 24 GiB GPU beside an 8B model."""
    assert cli.main(["memory", "dummy:llama-3.1-8b", "--gpu-memory-gib", "24", "--max-model-len", "8192", *flags]) == 0
    (blocks,) = re.findall(r"KV blocks of 16 tokens\s*\S\s*([\d,]+)", capsys.readouterr().out)
    return int(blocks.replace(",", ""))


def test_each_flag_against_too_little_memory_makes_room(capsys: pytest.CaptureFixture[str]) -> None:
    before = kv_room(capsys)
    for flags in (
        ("--gpu-memory-utilization", "0.95"), ("--max-num-batched-tokens", "2048"), ("--max-num-seqs", "32"),
        ("--kv-cache-dtype", "fp8"),
    ):  # fmt: skip
        assert kv_room(capsys, *flags) > before, flags


def test_what_keeps_the_server_from_starting_is_told_as_the_page_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [
        of_command(capsys, "smollm-135m", "--port", "0"),
        port_in_use(capsys, tmp_path),
        of_engine(max_model_len=100000),
        of_engine(kv_cache_memory=1e-9),
        of_memory(capsys),
        no_device(monkeypatch, 0, built=True),
        no_device(monkeypatch, 1, built=False),
        of_engine(scheduler="fcfs", scheduler_params={"watermrk": 1}),
        of_command(capsys, "dummy:tiny", "--port", "0", "--tensor-parallel-size", "2"),
        wrong_configuration(capsys, tmp_path),
    ]
    for symptom, words in zip(symptoms("The server does not start"), said, strict=True):
        assert pattern(*quoted(symptom)).search(words), words


# What requests are answered.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One request at once, one in the queue, 128 slots, small bodies and heads, a key."""
    log = tmp_path_factory.mktemp("small") / "log"
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--num-blocks", "400", "--max-body-mib", "0.1")
    live = start(log, "small", "--api-key", "secret", *flags, engine=FAULTY)
    yield live
    live.stop()


def queue_full(server: LiveServer) -> Answer:
    held = []
    for field in ("running", "waiting"):
        held.append(server.send(headers=KEY, max_tokens=6000))
        server.wait_until(lambda stats, field=field: stats[field] == 1)
    answer = server.post(TEXT, {"prompt": "a"}, KEY)
    for connection in held:
        connection.close()
    server.wait_until(lambda stats: stats["running"] == stats["waiting"] == 0)
    return answer


def refused(headers: dict[str, str] = KEY, **fields: object) -> Callable[[LiveServer], Answer]:
    return lambda server: server.post(TEXT, {"prompt": "a", **fields}, headers)


def hangs(tmp_path: Path) -> Answer:
    hanging = start(tmp_path / "hanging", "hanging", "--step-timeout", "0.2", engine=FAULTY)
    answer = hanging.post(TEXT, {"prompt": "H"})
    assert hanging.process.wait(DEADLINE) == 1
    return answer


def shutting_down(server: LiveServer, tmp_path: Path) -> Answer:
    ending = start(tmp_path / "log", "slow", "--shutdown-timeout", "0.1", engine=SLOW)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ending.post, TEXT, {"prompt": "a", "max_tokens": 8000})
        ending.wait_until(lambda stats: stats["running"] == 1)
        ending.process.send_signal(signal.SIGTERM)
        return answer.result(DEADLINE)


def test_requests_are_answered_as_the_page_says(small: LiveServer, tmp_path: Path) -> None:
    provoked: list[tuple[Callable[[LiveServer], Answer], ...]] = [
        (refused(temperature=-1),),
        (refused(prompt="a" * 9000),),
        (refused(max_tokens=8000),),
        (refused(guided_regex="(", max_tokens=2),),
        (refused({}), refused({"authorization": "Bearer wrong"})),
        (refused(model="other"),),
        (
            refused(prompt="a" * 200_000),
            refused({**KEY, "x": "a" * 70_000}),
            refused({**KEY, "content-type": "text/a"}),
        ),
        (refused(prompt="O"),),
        (queue_full,),
        (refused(prompt="K"),),
        (lambda server: hangs(tmp_path),),
        (lambda server: shutting_down(server, tmp_path),),
    ]
    for symptom, ways in zip(symptoms("Requests fail"), provoked, strict=True):
        statuses = re.findall(r"\b[45]\d\d\b", symptom)
        for status, ask in zip(statuses * (1 if len(statuses) > 1 else len(ways)), ways, strict=True):
            answer = ask(small)
            assert answer.status == int(status), (symptom, answer.body)
            for words in quoted(symptom):
                whole = " ".join(f"{name} {value}" for name, value in answer.error.items())
                assert pattern(words).search(whole), (symptom, whole)
    assert small.process.wait(DEADLINE) == 1  # its engine was killed


def test_connections_are_refused_until_the_model_is_loaded() -> None:
    bound = _bind(ServerOptions(port=0))
    with pytest.raises(ConnectionRefusedError), bound:
        socket.create_connection(bound.getsockname())


def cli_help(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The flags of `serve`."""
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    return set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


def test_the_defaults_and_names_that_the_page_tells_are_the_servers(
    stub: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Output stops after 16 tokens" in PAGE
    assert stub.complete(prompt="a", ignore_eos=True)["usage"]["completion_tokens"] == 16
    metrics = stub.get("/metrics").body.decode()
    for name in set(re.findall(r"`(vllm:\w+)`", PAGE)):
        assert f"\n{name}" in metrics, name
    flags = cli_help(capsys)
    for flag in set(re.findall(r"`(--[a-z-]+)", PAGE)):
        assert flag in flags, flag


def test_a_start_writes_the_versions_that_two_machines_are_compared_by(stub: LiveServer) -> None:
    (path,) = (stub.log.parent / "configs").iterdir()
    versions = yaml.safe_load(path.read_text())["resolved"]["versions"]
    installed = {name: metadata.version(name) for name in versions if name not in ("research_engine", "python")}
    assert "among `versions`" in PAGE
    assert {"torch", "transformers", "msgspec"} <= set(installed)
    assert versions == {"research_engine": __version__, "python": platform.python_version(), **installed}


def test_kernels_of_another_python_are_told_as_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = _Missing(ImportError("No module named 'research_engine._C'"))
    for words in ("The kernels are not built (", "research_engine._C, the compiled kernels, cannot be imported"):
        assert f"`{words}" in PAGE
    monkeypatch.setattr(build_info_module, "_C", missing)
    (problem,) = build_info_module.build_info()["problems"]
    assert problem.startswith("The kernels are not built (")
    with pytest.raises(ImportError, match=r"^research_engine._C, the compiled kernels, cannot be imported"):
        _ = missing.rms_norm


def test_a_cache_that_is_too_small_shows_in_the_preemptions(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "stub", "--num-blocks", "8", engine=STUB)
    server.complete(prompt="a", n=4, max_tokens=100, ignore_eos=True)
    (line,) = re.findall(r"^vllm:num_preemptions_total.* (\S+)$", server.get("/metrics").body.decode(), re.MULTILINE)
    assert float(line) > 0
    assert server.stop() == 0


def metric(server: LiveServer, name: str) -> float:
    """A value of /metrics without labels of its own."""
    (value,) = re.findall(rf"^vllm:{name}{{.*}} (\S+)$", server.get("/metrics").body.decode(), re.MULTILINE)
    return float(value)


def test_a_queue_shows_as_time_before_the_first_step_and_goes_with_more_seats(tmp_path: Path) -> None:
    """Steps of 20 ms or more. With one seat the second in the queue waits for 10 of them, the third for 20."""
    server = start(tmp_path / "one", "slow", "--max-num-seqs", "1", engine=SLOW)
    held = server.send()
    server.wait_until(lambda stats: stats["running"] == 1)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(server.complete, prompt="a", max_tokens=10) for _ in range(3)]
        server.wait_until(lambda stats: stats["waiting"] == 3)
        held.close()
        assert all(answer.result(DEADLINE) for answer in answers)
    assert metric(server, "request_queue_time_seconds_sum") >= 0.5
    assert server.stop() == 0
    server = start(tmp_path / "more", "slow", "--max-num-seqs", "8", "--shutdown-timeout", "0", engine=SLOW)
    held = server.send()
    server.wait_until(lambda stats: stats["running"] == 1)
    assert server.complete(prompt="a", max_tokens=1)  # served beside it
    held.close()
    assert server.stop() == 0


def test_prompts_that_begin_alike_show_as_hits_of_the_prefix_cache(server: LiveServer) -> None:
    before = metric(server, "prefix_cache_hits_total")
    for end in ("x", "y"):
        server.complete(prompt="prompts that begin alike " * 4 + end, max_tokens=1)
    assert metric(server, "prefix_cache_hits_total") >= before + 64

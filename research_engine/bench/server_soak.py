"""Keeps a server under streams, slow readers and disconnects; watches what must stay flat: memory, blocks, debts."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from research_engine.bench.server import running
from research_engine.bench.server_load import http_request

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_SAMPLES = 10


def soak(seconds: float, streams: int, console: Console) -> int:
    """Run it and report. Returns 0 when every answer was whole and nothing was left behind, else 1."""
    with running("server") as port:
        outcome, samples = asyncio.run(_soak(port, seconds, streams))
    table = Table(title=f"{streams} streams for {seconds:g} s", title_justify="left")
    for name in ("time, s", "server, MiB", "engine, MiB", "running", "waiting", "unanswered", "KV use"):
        table.add_column(name, justify="right")
    for sample in samples:
        table.add_row(*sample)
    console.print(table)
    console.print(", ".join(f"{count} {what}" for what, count in sorted(outcome.items())))
    left = samples[-1][3:]
    good = not outcome["broken"] and left == ("0", "0", "0", "0.0 %")
    console.print(
        "every answer was whole and nothing is left" if good else "[red]answers were broken, or something is left"
    )
    return 0 if good else 1


async def _soak(port: int, seconds: float, streams: int) -> tuple[Counter[str], list[tuple[str, ...]]]:
    outcome: Counter[str] = Counter()
    end = time.monotonic() + seconds
    clients = [asyncio.create_task(_client(port, seed, end, outcome)) for seed in range(streams)]
    samples, began = [], time.monotonic()
    for index in range(_SAMPLES):
        await asyncio.sleep(max(0.0, began + seconds * (index + 1) / _SAMPLES - time.monotonic() - 0.1))
        samples.append(await _sample(port, began))
    await asyncio.gather(*clients)
    while True:  # aborts of the last disconnects may still be under way
        samples.append(await _sample(port, began))
        if samples[-1][3:6] == ("0", "0", "0") or time.monotonic() > end + 60:
            return outcome, samples
        samples.pop()
        await asyncio.sleep(0.2)


async def _client(port: int, seed: int, end: float, outcome: Counter[str]) -> None:
    """One request after the other: most read at once, some slowly, some leave in the middle."""
    chance = random.Random(seed)
    while time.monotonic() < end:
        tokens, kind = chance.randint(1, 400), chance.random()
        request = http_request("/v1/completions", {"prompt": "soak", "max_tokens": tokens, "stream": kind < 0.9})
        limit = 2048 if kind < 0.2 else 65536
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
            writer.write(request)
            if 0.2 <= kind < 0.4:
                await asyncio.wait_for(reader.read(chance.randint(1, 4096)), 60)
                outcome["left"] += 1
            else:
                answer = await _read(reader, chance.uniform(0.0, 0.05) if kind < 0.2 else 0.0)
                outcome["whole" if _text(answer) == (_ALPHABET * 16)[:tokens] else "broken"] += 1
            writer.close()
        except (OSError, asyncio.TimeoutError, ValueError):
            outcome["broken"] += 1


async def _read(reader: asyncio.StreamReader, pause: float) -> bytes:
    """All of an answer, `pause` seconds between pieces of 1 KiB."""
    answer = bytearray()
    whole = -1
    while True:
        piece = await reader.read(1024 if pause else 65536)
        if not piece:
            raise ValueError("the answer was cut")
        answer += piece
        if whole < 0 and (head := answer.find(b"\r\n\r\n")) >= 0:
            at = answer.lower().find(b"content-length:", 0, head)
            whole = head + 4 + int(answer[at + 15 : answer.find(b"\r\n", at)]) if at >= 0 else 0
        if len(answer) >= whole > 0 or (whole == 0 and answer.endswith(b"\r\n0\r\n\r\n")):
            return bytes(answer)
        if pause:
            await asyncio.sleep(pause)


def _text(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"content-length" in head.lower():
        whole: str = json.loads(body)["choices"][0]["text"]
        return whole
    events = (line for line in body.split(b"\n") if line.startswith(b"data: {"))
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in events)


async def _sample(port: int, began: float) -> tuple[str, ...]:
    """Time, memory of both processes, and the server's own account."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /stats?since=1000000000 HTTP/1.1\r\nhost: soak\r\n\r\n")
    stats: dict[str, Any] = json.loads((await _read(reader, 0.0)).partition(b"\r\n\r\n")[2])
    writer.close()
    memory = [f"{_memory(pid):.0f}" for pid in _server_and_engine(port)]
    state = [str(stats[name]) for name in ("running", "waiting", "unanswered")]
    use = f"{stats['kv_utilization']:.1%}".replace("%", " %")
    return (f"{time.monotonic() - began:.0f}", *memory, *state, use)


def _memory(pid: int) -> float:
    """MiB that a process holds, from Linux's /proc."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _server_and_engine(port: int) -> tuple[int, int]:
    """Process ids: the server is a child of ours, the engine a child of the server's."""
    for server in _children(os.getpid()):
        if b"server_target" in Path(f"/proc/{server}/cmdline").read_bytes():
            for engine in _children(server):
                if b"spawn_main" in Path(f"/proc/{engine}/cmdline").read_bytes():
                    return server, engine
    raise RuntimeError(f"no server of ours listens on port {port}")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

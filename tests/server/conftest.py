"""Two servers for all tests here: a small real model, and a stub that computes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.live import STUB, LiveServer, start


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """dummy:tiny in float32 with a small cache."""
    log = tmp_path_factory.mktemp("server") / "log"
    live = start(log, "dummy:tiny", "--device", "cpu", "--num-blocks", "1024", "--max-model-len", "4096",
                 "--max-num-seqs", "16", "--check-integrity", "--served-model-name", "tiny", "dummy:tiny")  # fmt: skip
    yield live
    live.wait_until_quiet()
    assert live.stop() == 0, log.read_text()


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """An engine that spells the alphabet at once."""
    log = tmp_path_factory.mktemp("stub") / "log"
    live = start(log, "stub", "--num-blocks", "1024", "--check-integrity", engine=STUB)
    yield live
    live.wait_until_quiet()
    assert live.stop() == 0, log.read_text()

"""`python -m research_engine.bench.server_target {server,baseline}`: what `bench server` measures, on a free port."""

from __future__ import annotations

import logging
import socket
import sys

from research_engine.options import EngineOptions
from research_engine.server.engine_source import EngineSource
from research_engine.server.live_records import LiveRecords
from research_engine.server.serve import run
from research_engine.server.serve_options import ServeOptions, ServerOptions
from research_engine.server.stub_engine import stub_parts

ENGINE = EngineOptions("stub", max_num_seqs=1024, num_blocks=65536, enable_prefix_caching=False)
STUB = "research_engine.server.stub_engine:stub"


def serve_baseline() -> int:
    """The baseline, until it is told to end."""
    import uvicorn

    from research_engine.bench.server_baseline import baseline_app

    logging.disable(logging.WARNING)
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.listen(4096)
    print(f"serving stub on http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
    app = baseline_app(stub_parts(ENGINE, LiveRecords()).engine)
    config = uvicorn.Config(app, log_config=None, access_log=False, log_level="error")
    uvicorn.Server(config).run(sockets=[bound])
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "baseline":
        sys.exit(serve_baseline())
    options = ServeOptions(ENGINE, ServerOptions(port=0, log_level="warning"))
    sys.exit(run(options, EngineSource(ENGINE, f"{STUB}_parts", f"{STUB}_tokenizer")))

"""`python -m tests.server.run_server ENGINE TOKENIZER [flags of serve]`: a server around an engine of the test's."""

from __future__ import annotations

import sys

from research_engine.server.engine_source import EngineSource
from research_engine.server.serve import run
from research_engine.server.serve_options import parse

if __name__ == "__main__":
    engine, tokenizer, *flags = sys.argv[1:]
    options = parse(flags)
    try:
        code = run(options, EngineSource(options.engine, engine, tokenizer))
    except ValueError as error:
        print(error, file=sys.stderr)
        code = 2
    sys.exit(code)

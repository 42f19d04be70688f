"""Requests made up from the server's own description: none is answered with 500, and none hangs.

`python -m tests.server.test_fuzz NUMBER` sends as many a path to a server of its own.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import schemathesis

from tests.server.live import DEADLINE, STUB, LiveServer, start

SMALL = {"max_tokens": 4, "max_completion_tokens": 4, "n": 2}  # else a made-up request asks for thousands of tokens

SOUND: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello", "tokens": [65]}


def fuzz(server: LiveServer, path: str, number: int) -> Counter[int]:
    """Send made-up requests to a path; the statuses. Fails at a 500, and at an error of another shape."""
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    (operation,) = [found.ok() for found in schema.get_all_operations() if found.ok().path == path]

    @hypothesis.settings(
        max_examples=number, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(), kept=st.sets(st.integers(0, 40), max_size=4), sound=st.booleans())
    def send(case: schemathesis.Case, kept: set[int], sound: bool) -> None:
        if isinstance(case.body, dict):
            needed = ("prompt", "messages", "input", "tokens")  # with all fields at random, one is always wrong
            names = [name for at, name in enumerate(case.body) if at in kept or name in needed]
            case.body = {name: case.body[name] for name in names}
            if sound:  # a made-up conversation never is one, and the other fields would not be looked at
                case.body.update({name: value for name, value in SOUND.items() if name in case.body})
            for name, most in SMALL.items():
                if isinstance(case.body.get(name), int):
                    case.body[name] = min(case.body[name], most)
            if "model" in case.body:
                case.body["model"] = None
        answer = case.call(timeout=DEADLINE)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, (answer.text, case.body)
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    send()
    return statuses


PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/embeddings", "/stats"]


@pytest.mark.parametrize("path", PATHS)
def test_made_up_requests_are_answered_or_refused(stub: LiveServer, path: str) -> None:
    statuses = fuzz(stub, path, 40)
    stub.wait_until_quiet()
    assert sum(statuses.values()) >= 20
    assert stub.complete(prompt="a", max_tokens=3)["choices"][0]["text"] == "abc"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        live = start(Path(folder) / "log", "stub", "--max-model-len", "256", engine=STUB)  # a chat runs to its end
        for path in PATHS:
            print(path, dict(fuzz(live, path, int(sys.argv[1]))), flush=True)
        assert live.complete(prompt="a", max_tokens=3)["choices"][0]["text"] == "abc"
        live.wait_until_quiet()
        sys.exit(live.stop())

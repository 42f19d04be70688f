"""OpenAI's own client: chat, completions, streams, errors, retries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.faulty import SLOW
from tests.server.live import DEADLINE, LiveServer, start

HELLO = [{"role": "user", "content": "hello"}]


def client_of(server: LiveServer, **options: object) -> openai.OpenAI:
    return openai.OpenAI(
        **{"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "timeout": DEADLINE, **options}
    )


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "dummy:tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_chat_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    fields = {
        "model": "tiny",
        "messages": HELLO,
        "max_completion_tokens": 12,
        "seed": 4,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**fields)
    text, usage, reasons = "", None, []
    with client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert usage == whole.usage and reasons == ["length"]


def test_completions_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    fields = {"model": "tiny", "prompt": "hello", "max_tokens": 12, "seed": 4, "logprobs": 2}
    whole = client.completions.create(**fields)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True))
    assert streamed == whole.choices[0].text
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens


def test_a_parsed_answer_is_of_the_model_asked_for(client: openai.OpenAI) -> None:
    from typing import Literal

    from pydantic import BaseModel

    class Answer(BaseModel):
        colour: Literal["red", "green"]

    bias = {str(ord(space)): -100 for space in " \n\r\t"}
    parsed = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Answer, max_tokens=100, seed=1, logit_bias=bias
    )
    assert parsed.choices[0].message.parsed.colour in ("red", "green")


def test_errors_are_the_clients_exceptions(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature" and "temperature" in bad.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="a" * 5000, stream=True)


def test_a_client_that_breaks_off_its_stream_frees_the_server(client: openai.OpenAI, server: LiveServer) -> None:
    with client.completions.create(model="tiny", prompt="a", max_tokens=4000, stream=True) as stream:
        next(iter(stream))
    server.wait_until(lambda stats: stats["running"] == 0 and stats["kv_utilization"] == 0)


def test_the_client_tries_again_when_the_queue_is_full(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "slow", "--max-num-seqs", "1", "--max-num-queued-reqs", "1", engine=SLOW)
    held = [server.send()]
    server.wait_until(lambda stats: stats["running"] == 1)
    held.append(server.send())
    server.wait_until(lambda stats: stats["waiting"] == 1)
    statuses: list[int] = []

    def seen(response: httpx.Response) -> None:
        statuses.append(response.status_code)
        while held:
            held.pop().close()

    with (
        httpx.Client(event_hooks={"response": [seen]}) as http,
        client_of(server, max_retries=8, http_client=http) as made,
    ):
        assert made.completions.create(model="slow", prompt="a", max_tokens=2).choices[0].text == "ab"
    assert statuses[0] == 503 and statuses[-1] == 200
    assert server.stop() == 0


def test_a_wrong_key_is_an_authentication_error(tmp_path: Path) -> None:
    server = start(tmp_path / "log", "slow", engine=SLOW, RESEARCH_ENGINE_API_KEY="right")
    with client_of(server, api_key="wrong") as wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    with client_of(server, api_key="right") as right:
        assert right.models.list().data[0].id == "slow"
    assert "right" not in "".join(path.read_text() for path in (tmp_path / "configs").iterdir())
    assert server.stop() == 0


def test_many_asynchronous_calls(stub: LiveServer) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{stub.url}/v1", api_key="none", timeout=DEADLINE) as client:

            async def one(n: int) -> str:
                stream = await client.chat.completions.create(model="stub", messages=HELLO, max_tokens=n, stream=True)  # type: ignore[call-overload]
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(n) for n in range(1, 27)))

    assert asyncio.run(run()) == ["abcdefghijklmnopqrstuvwxyz"[:n] for n in range(1, 27)]

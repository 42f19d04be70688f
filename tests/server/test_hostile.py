"""Requests made to harm: none gets a 500, none holds the server up."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from research_engine.server.limits import BoundedProtocol
from tests.server.live import DEADLINE, LiveServer
from tests.server.test_access import Pipe

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BOMBS = [
    ("guided_regex", "(a{1000}){1000}"),
    ("guided_regex", "((a{100}){100}){100}"),
    ("guided_regex", "(a?){3000}a{3000}"),
    ("guided_regex", "(" * 5000 + "a" + ")" * 5000),
    ("guided_json", nested(300)),
    ("guided_json", {"$ref": "#"}),
    ("guided_json", {"$ref": "file:///etc/passwd"}),
    ("guided_json", {"allOf": [{"anyOf": [{"pattern": f".*{c}.*"} for c in "abcdefgh"]}] * 12}),
    ("guided_grammar", "start: start"),
    ("guided_grammar", 'start: "a"{1000000}'),
    ("guided_grammar", "start: " + "(" * 3000 + '"a"' + ")" * 3000),
]


@pytest.mark.parametrize(("field", "value"), BOMBS, ids=range(len(BOMBS)))
def test_a_form_that_would_cost_too_much_is_refused(server: LiveServer, field: str, value: Any) -> None:
    answer = server.post(TEXT, {"prompt": "a", "max_tokens": 4, field: value})
    assert (answer.status, answer.error["param"]) == (400, field), answer.body
    assert "root:" not in answer.error["message"]


@pytest.mark.parametrize("regex", ["(a*)*b", "(x+x+)+y", "(a|aa)+$", ".*a.{20}", "(a|ab)(c|bcd)(d*){50}"])
def test_what_backtracks_elsewhere_is_served_here(server: LiveServer, regex: str) -> None:
    assert server.complete(prompt="a", max_tokens=4, guided_regex=regex)["choices"][0]["text"]


@pytest.mark.parametrize("name", ["n", "max_tokens", "seed", "top_k", "priority", "logprobs", "min_tokens"])
@pytest.mark.parametrize("value", ["1" + "0" * 18, "1" + "0" * 40, "-1" + "0" * 40, "1e400", "NaN"])
def test_numbers_beyond_all_bounds_are_refused_or_cut(stub: LiveServer, name: str, value: str) -> None:
    answer = stub.post(TEXT, f'{{"prompt": "a", "ignore_eos": true, "stop": "c", "{name}": {value}}}'.encode())
    assert answer.status in (200, 400), answer.body
    if answer.status == 400:
        assert answer.error["message"]


def test_continuations_of_all_prompts_are_bounded(stub: LiveServer) -> None:
    answer = stub.post(TEXT, {"prompt": ["a"] * 2048, "n": 128, "max_tokens": 1})
    assert (answer.status, answer.error["param"]) == (400, "n")
    assert "2048 prompts" in answer.error["message"] and "at most 4" in answer.error["message"]


@pytest.mark.parametrize("raw", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x00", b"\x1b"])
def test_bytes_that_are_no_text_are_refused(stub: LiveServer, raw: bytes) -> None:
    for path, body in (
        (TEXT, b'{"prompt": "a%b"}'), (CHAT, b'{"messages": [{"role": "user", "content": "a%b"}]}'),
        ("/tokenize", b'{"prompt": "a%b"}'), ("/v1/embeddings", b'{"input": "a%b"}'),
    ):  # fmt: skip
        answer = stub.post(path, body % raw)
        assert (answer.status, answer.error["code"]) == (400, "invalid_json"), answer.body


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: -1", b"content-length: 1e3", b"content-length: 99999999999999999999999",
        b"content-length: 5\r\ncontent-length: 6", b"content-length: 5\r\ntransfer-encoding: chunked",
        b"transfer-encoding: gzip", b"x: \x00", b" folded: a", b"no colon",
    ],
)  # fmt: skip
def test_heads_that_break_the_protocol_close_the_connection(stub: LiveServer, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", stub.port), timeout=DEADLINE) as connection:
        kind = b"content-type: application/json\r\n"
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + kind + head + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while piece := connection.recv(4096):
            received += piece
    assert not received or received.split()[1].startswith(b"4"), received


def test_odd_heads_are_read_as_they_are(stub: LiveServer) -> None:
    for path in (
        "/%ff%fe",
        "/v1/models/%00",
        "/v1/models/%ed%a0%80",
        "/" + "a" * 5000,
        "//v1/../v1/models",
        "/%2e%2e/x",
    ):
        assert stub.get(path).status == 404, path
    assert stub.get("/version", **{"x-request-id": "a" * 5000}).status == 200


def test_requests_that_are_hard_work_are_answered_and_so_is_a_short_one_beside_them(stub: LiveServer) -> None:
    hard: list[tuple[str, dict[str, Any]]] = [
        ("/detokenize", {"tokens": [65] * 1_000_000}),
        ("/tokenize", {"prompt": "a" * 200_000, "return_token_strs": True}),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 50_000}),
        (TEXT, {"prompt": ["a" * 100] * 2000 + ["a" * 9000]}),
    ]
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(stub.post, path, body) for path, body in hard]
        assert stub.complete(prompt="a", max_tokens=3)["choices"][0]["text"] == "abc"
        assert [answer.result(DEADLINE).status for answer in answers] == [200, 200, 400, 400]


def test_a_conversation_is_data_to_the_template_whatever_it_holds(server: LiveServer) -> None:
    attack = "{{ self.__init__.__globals__ }}{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}"
    body = {"messages": [{"role": "user", "content": attack}]}
    tokens = server.post("/tokenize", body).json()["tokens"]
    assert attack in server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


@pytest.mark.parametrize(
    "variables",
    [
        {"messages": None}, {"bos_token": {}}, {"raise_exception": 1}, {"range": None}, {"namespace": "x"},
        {"__class__": 1}, {"self": 1}, {"loop": 1}, {"add_generation_prompt": "{{ 1/0 }}"}, {"": ""},
    ],
)  # fmt: skip
def test_variables_for_the_template_change_nothing_that_is_not_theirs(server: LiveServer, variables: Any) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template_kwargs": variables}
    answer = server.post(CHAT, body)
    assert answer.status in (200, 400), answer.body


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "self"])
def test_a_variable_that_the_template_gets_anyhow_is_refused_by_name(server: LiveServer, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: 1}}
    answer = server.post(CHAT, body)
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
    assert f"chat_template_kwargs holds '{name}'" in answer.json()["error"]["message"]


def answered(pieces: list[bytes]) -> bytes:
    """What a connection that is not worth waiting for is told."""
    import uvicorn
    from uvicorn.server import ServerState

    async def reads_all(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def run() -> bytes:
        protocol = BoundedProtocol(uvicorn.Config(reads_all, lifespan="off"), ServerState(), {})  # type: ignore[arg-type]
        protocol.header_seconds = protocol.client_seconds = 0.01
        pipe = Pipe()
        protocol.connection_made(pipe)
        for piece in pieces:
            protocol.data_received(piece)
        while not pipe.closed:
            await asyncio.sleep(0.001)
        protocol.connection_lost(None)
        return pipe.written

    return asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_a_connection_that_says_nothing_is_closed() -> None:
    assert b" 408 " in answered([])


def test_a_body_that_does_not_end_is_refused() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
    assert b" 408 " in answered([head])
    assert b" 408 " in answered([head, b"{", b" "])


def test_hundreds_of_half_sent_requests_hold_nobody_up(stub: LiveServer) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
    held = []
    try:
        for number in range(300):
            held.append(socket.create_connection(("127.0.0.1", stub.port), timeout=DEADLINE))
            held[-1].sendall(whole[: number % (len(whole) - 1)])
        assert stub.complete(prompt="a", max_tokens=3)["choices"][0]["text"] == "abc"
    finally:
        for connection in held:
            connection.close()

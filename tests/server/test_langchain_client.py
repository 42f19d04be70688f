"""LangChain's OpenAI classes against the server; needs `pip install langchain-openai`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.faulty import EMBEDDING
from tests.server.live import DEADLINE, LiveServer, start

langchain_openai = pytest.importorskip("langchain_openai")


def at(server: LiveServer, **options: Any) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0, "timeout": DEADLINE, **options}


def chat_model(server: LiveServer, **options: Any) -> Any:
    return langchain_openai.ChatOpenAI(**at(server, **{"model": "tiny", "max_tokens": 16, "seed": 3, **options}))


def test_a_chat_is_the_same_whole_and_streamed(server: LiveServer) -> None:
    chat = chat_model(server)
    whole = chat.invoke([("system", "Be brief."), ("human", "hello")])
    chunks = list(chat.stream([("system", "Be brief."), ("human", "hello")], stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage == whole.usage_metadata
    assert len(chat.batch(["a", "b", "c"])) == 3


def test_a_structured_output_is_an_object_of_its_schema(server: LiveServer) -> None:
    schema = {
        "title": "Answer",
        "description": "A colour.",
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    bias = {str(ord(space)): -100 for space in " \n\r\t"}  # random weights would fill the answer with white space
    for method in ("json_schema", "function_calling"):
        chat = chat_model(server, logit_bias=bias, max_tokens=200)
        assert chat.with_structured_output(schema, method=method).invoke("hi")["colour"] in ("red", "green"), method


def test_a_forced_tool_is_called_and_its_result_taken(server: LiveServer) -> None:
    tool = {
        "type": "function",
        "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {},
                                                                              "additionalProperties": False}},
    }  # fmt: skip
    bias = {str(ord(space)): -100 for space in " \n\r\t"}
    called = chat_model(server, logit_bias=bias, max_tokens=200).bind_tools([tool], tool_choice="now").invoke("hi")
    (call,) = called.tool_calls
    assert call["name"] == "now"
    history = [("human", "hi"), called, {"role": "tool", "content": "noon", "tool_call_id": call["id"]}]
    assert chat_model(server).invoke(history).usage_metadata["output_tokens"] >= 1


def test_a_completion_and_a_refusal(server: LiveServer) -> None:
    llm = langchain_openai.OpenAI(**at(server, model="tiny", max_tokens=8, seed=3))
    assert "".join(llm.stream("hello")) == llm.invoke("hello")
    with pytest.raises(Exception, match="temperature = -1") as refused:
        chat_model(server, temperature=-1).invoke("hi")
    assert refused.value.status_code == 400


def test_embeddings_of_texts(tmp_path: Path) -> None:
    live = start(tmp_path / "log", "embedder", engine=EMBEDDING)
    embedder = langchain_openai.OpenAIEmbeddings(**at(live, model="embedder", check_embedding_ctx_length=False))
    vectors = embedder.embed_documents(["ab", "ba", "b"])
    assert [len(vector) for vector in vectors] == [8, 8, 8]
    assert vectors[0] == vectors[1] != vectors[2] == embedder.embed_query("b")
    assert live.stop() == 0

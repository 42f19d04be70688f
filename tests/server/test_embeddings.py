"""/v1/embeddings: both encodings, cutting, and a model that does not embed."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from research_engine import LLM
from tests.server.faulty import EMBEDDING
from tests.server.live import LiveServer, start

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("embedder") / "log"
    live = start(log, "embedder", engine=EMBEDDING)
    yield live
    live.wait_until_quiet()
    assert live.stop() == 0, log.read_text()


def test_base64_is_little_endian_float32_and_equals_float(embedder: LiveServer) -> None:
    texts = ["one", "two", "three"]
    floats = embedder.post(PATH, {"input": texts, "encoding_format": "float"}).json()
    coded = embedder.post(PATH, {"input": texts, "encoding_format": "base64"}).json()
    for index, (a, b) in enumerate(zip(floats["data"], coded["data"], strict=True)):
        assert a["index"] == b["index"] == index
        assert list(struct.unpack("<8f", base64.b64decode(b["embedding"]))) == a["embedding"]
    assert floats["usage"] == {"prompt_tokens": 11, "total_tokens": 11}
    assert floats["object"] == "list" and floats["data"][0]["object"] == "embedding"


def test_the_openai_client_gets_the_same_numbers_by_its_default_encoding(embedder: LiveServer) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        made = client.embeddings.create(model="embedder", input="one")
    floats = embedder.post(PATH, {"input": "one", "encoding_format": "float"}).json()
    assert made.data[0].embedding == floats["data"][0]["embedding"]


def test_fewer_dimensions_are_the_first_ones_at_length_1(embedder: LiveServer) -> None:
    whole = embedder.post(PATH, {"input": "one"}).json()["data"][0]["embedding"]
    cut = embedder.post(PATH, {"input": "one", "dimensions": 3}).json()["data"][0]["embedding"]
    assert math.isclose(sum(value * value for value in cut), 1.0, rel_tol=1e-6)
    ratios = [a / b for a, b in zip(whole[:3], cut, strict=True)]
    assert max(ratios) - min(ratios) < 1e-6


def test_an_input_may_be_token_ids(embedder: LiveServer) -> None:
    text = embedder.post(PATH, {"input": "ab"}).json()["data"]
    for given in ([97, 98], [[97, 98]], ["ab"]):
        assert embedder.post(PATH, {"input": given}).json()["data"] == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [300]}, "input"),
        ({"input": "a" * 200}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 9}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_a_wrong_field_is_named(embedder: LiveServer, fields: dict[str, object], param: str) -> None:
    answer = embedder.post(PATH, {"input": "a", **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_model_that_does_not_embed_says_so(stub: LiveServer) -> None:
    answer = stub.post(PATH, {"input": "a"})
    assert (answer.status, answer.error["param"]) == (400, "model")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A decoder with random weights that embeds by its last token, under a policy that is not the default."""
    log = tmp_path_factory.mktemp("real") / "log"
    live = start(log, "dummy:tiny", "--device", "cpu", "--runner", "pooling", "--scheduler", "sjf",
                 "--max-model-len", "64", "--check-integrity")  # fmt: skip
    yield live
    live.wait_until_quiet()
    assert live.stop() == 0, log.read_text()


def test_the_server_gives_the_numbers_of_llm_embed(real: LiveServer) -> None:
    texts = ["one", "a longer text than the other", "x"]
    made = LLM("dummy:tiny", task="embed", device="cpu").embed(texts, use_tqdm=False)
    answer = real.post(PATH, {"input": texts, "encoding_format": "float"}).json()
    for entry, output in zip(answer["data"], made, strict=True):
        assert entry["embedding"] == pytest.approx(output.outputs.embedding, abs=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in made)


def test_requests_at_once_each_get_their_own(real: LiveServer) -> None:
    """One of them is refused, and takes none of the others with it."""
    texts = ["a", "b" * 65, "ccc", "dd"]
    alone = [real.post(PATH, {"input": text}).json() for text in texts]
    with ThreadPoolExecutor(len(texts)) as pool:
        together = list(pool.map(lambda text: real.post(PATH, {"input": text}), texts))
    assert [answer.status for answer in together] == [200, 400, 200, 200]
    assert "64 at most" in together[1].error["message"] and together[1].error["param"] == "input"
    for answer, expected in zip(together, alone, strict=True):
        if answer.status == 200:
            made = answer.json()["data"][0]["embedding"]
            assert made == pytest.approx(expected["data"][0]["embedding"], abs=1e-5)


def test_an_embedder_does_not_complete(real: LiveServer) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = real.post(path, body)
        assert answer.status == 400
        assert "embeds and does not generate" in answer.error["message"]
        assert answer.error["param"] == "model"  # whether or not it has a chat template or such a prompt would fit

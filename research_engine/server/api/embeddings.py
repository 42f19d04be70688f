"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from research_engine.server.api.answers import to_json
from research_engine.server.context import ServerContext
from research_engine.server.engine_client import EngineDeadError, RefusedError
from research_engine.server.errors import decoded, invalid, of_engine
from research_engine.server.http import Call
from research_engine.server.protocol import EmbeddingRequest

_decoder = msgspec.json.Decoder(EmbeddingRequest)
MAX_INPUTS = 2048


async def embeddings(context: ServerContext, call: Call) -> None:
    """Embed texts or token ids. base64 is little-endian float32, the same numbers as `float`.

    Raises:
        ApiError: refused, or not served.
    """
    request = decoded(_decoder, call.body)
    context.ignored.look(EmbeddingRequest, call.body)
    context.check_model(request.model)
    if context.client.ready is not None and not context.client.ready.embeds:
        raise invalid(f"the model {context.model!r} is a generator, not an embedder", "model")
    prompts = await _inputs(context, request)
    try:
        embedded = await context.client.embed(prompts)
    except OverflowError:
        raise invalid("input holds a token id out of range: integers have 64 bits", "input") from None
    except (RefusedError, EngineDeadError) as error:
        raise of_engine(error, "input") from None
    data = []
    for index, raw in enumerate(embedded.vectors):
        vector = _shortened(np.frombuffer(raw, dtype="<f4"), request.dimensions)
        encoded: Any = vector.tolist()
        if request.encoding_format == "base64":
            encoded = base64.b64encode(vector.tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": encoded})
    usage = {"prompt_tokens": embedded.prompt_tokens, "total_tokens": embedded.prompt_tokens}
    await call.reply(to_json({"object": "list", "data": data, "model": context.model, "usage": usage}))


async def _inputs(context: ServerContext, request: EmbeddingRequest) -> list[list[int]]:
    given = request.input
    many: list[Any] = (
        [given] if isinstance(given, str) or (given and all(type(i) is int for i in given)) else list(given)
    )
    if not many or any(isinstance(item, int) for item in many):
        raise invalid("input must be a text, a list of token ids, or a list of either that is not empty", "input")
    if len(many) > MAX_INPUTS:
        raise invalid(f"input holds {len(many)} texts: at most {MAX_INPUTS} in a request", "input")
    for item in many:
        if isinstance(item, list):
            context.check_token_ids(item, "input")
    encoded = iter(await context.encode([item for item in many if isinstance(item, str)]))
    prompts = [next(encoded) if isinstance(item, str) else item for item in many]
    if not all(prompts):
        raise invalid("input holds an empty text", "input")
    return prompts


def _shortened(vector: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first `dimensions` numbers at length 1 again, as for models trained to be cut (Matryoshka)."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if not 1 <= dimensions <= len(vector):
        raise invalid(f"dimensions = {dimensions}: must be from 1 to {len(vector)}", "dimensions")
    cut = vector[:dimensions].astype(np.float64)
    return (cut / max(float(np.linalg.norm(cut)), 1e-12)).astype("<f4")

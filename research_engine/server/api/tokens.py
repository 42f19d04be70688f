"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any

import msgspec

from research_engine.server.api.answers import to_json
from research_engine.server.api.chat import chat_prompt
from research_engine.server.context import ServerContext, off_the_loop
from research_engine.server.errors import decoded, invalid
from research_engine.server.http import Call
from research_engine.server.protocol import DetokenizeRequest, TokenizeRequest

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(context: ServerContext, call: Call) -> None:
    """Token ids of a text or a conversation. Raises ApiError."""
    request = decoded(_tokenize_decoder, call.body)
    context.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if request.messages is not None:
        add_generation_prompt = request.add_generation_prompt is not False
        tokens = await chat_prompt(
            context, request.messages, size=len(call.body), add_generation_prompt=add_generation_prompt
        )
    else:
        assert request.prompt is not None
        (tokens,) = await context.encode([request.prompt], request.add_special_tokens is not False)
    limit = None if context.client.ready is None else context.client.ready.max_model_len
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": limit, "tokens": tokens}
    if request.return_token_strs:
        tokenizer = context.require_tokenizer()
        answer["token_strs"] = await off_the_loop(
            len(tokens), lambda: [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        )
    await call.reply(to_json(answer))


async def detokenize(context: ServerContext, call: Call) -> None:
    """The text of token ids. Raises ApiError."""
    request = decoded(_detokenize_decoder, call.body)
    context.check_model(request.model)
    tokenizer = context.require_tokenizer()
    bad = next((token for token in request.tokens if not 0 <= token < tokenizer.vocab_size), None)
    if bad is not None:
        raise invalid(f"tokens holds {bad}; ids go from 0 to {tokenizer.vocab_size - 1}", "tokens")
    text = await off_the_loop(len(request.tokens), lambda: tokenizer.decode(request.tokens, skip_special_tokens=False))
    await call.reply(to_json({"prompt": text}))

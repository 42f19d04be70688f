"""Enforces JSON schemas, regular expressions, choices and grammars with llguidance, which is imported on first use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from research_engine.engine.sampling_params import SamplingParams
from research_engine.engine.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from research_engine.loading.tokenizer import Tokenizer


class GrammarCompiler:
    """Makes the constraints of one model's requests.

    Args:
        tokenizer: the model's.
        vocab_size: of the model's logits, which may be more than the tokenizer knows; the rest is never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: Any = None

    def __call__(self, sampling: SamplingParams) -> LLGuidanceConstraint | None:
        """The constraint of a request; None where it asks for none.

        Raises:
            ValueError: the schema, expression or grammar is wrong; with llguidance's reason.
        """
        if sampling.structured_outputs is None:
            return None
        from llguidance import LLMatcher

        matcher = LLMatcher(self._vocabulary(), self._grammar(sampling.structured_outputs), log_level=0)
        if matcher.is_error():
            raise ValueError(f"structured_outputs: {_reason(matcher.get_error())}")
        return LLGuidanceConstraint(matcher)

    def check(self, params: StructuredOutputsParams) -> None:
        """As making a constraint, without one.

        Raises:
            ValueError: as above.
        """
        from llguidance import LLMatcher

        error = LLMatcher.validate_grammar(self._grammar(params), self._vocabulary())
        if error and not error.startswith("WARNING"):
            raise ValueError(f"structured_outputs: {_reason(error)}")

    def _vocabulary(self) -> Any:
        if self._compiled is None:
            from llguidance import LLTokenizer

            ends = list(self._tokenizer.eos_token_ids)
            self._compiled = LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=ends or None)
        return self._compiled

    @staticmethod
    def _grammar(params: StructuredOutputsParams) -> str:
        from llguidance import LLMatcher

        if params.json_object:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        if params.json is not None:
            schema = params.json
            if isinstance(schema, str):
                try:
                    schema = json.loads(schema)
                except ValueError as error:
                    raise ValueError(f"json is no JSON: {error}") from None
            if not isinstance(schema, Mapping):
                raise ValueError(f"json = {schema!r}: a JSON schema is an object")
            return LLMatcher.grammar_from_json_schema(json.dumps(dict(schema)))
        if params.regex is not None:
            return LLMatcher.grammar_from_regex(params.regex)
        if params.choice is not None:
            alternatives = " | ".join(json.dumps(text) for text in params.choice)
            return LLMatcher.grammar_from_lark(f"start: {alternatives}")
        assert params.grammar is not None
        return LLMatcher.grammar_from_lark(params.grammar)


class LLGuidanceConstraint:
    """A TokenConstraint on an llguidance matcher."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """See TokenConstraint."""
        mask: bytes = self._matcher.compute_bitmask()
        return mask if any(mask) else b"\xff" * len(mask)  # the matcher gave up in this very call; `ended` says so

    def advance(self, token_id: int) -> None:
        """See TokenConstraint."""
        self._matcher.consume_token(token_id)

    @property
    def ended(self) -> str | None:
        """See TokenConstraint."""
        if self._matcher.is_error():
            return "error"
        return "stop" if self._matcher.is_stopped() else None


def _reason(error: str) -> str:
    """The first line: what follows shows the grammar and the parser's state."""
    return error.strip().splitlines()[0] if error.strip() else "the grammar is not valid"

"""Enforces JSON schemas, regular expressions, choices and grammars with llguidance, which is imported on first use."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from research_engine.engine.sampling_params import SamplingParams
from research_engine.engine.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from research_engine.loading.tokenizer import Tokenizer


T = TypeVar("T")
MAX_GRAMMAR_BYTES = 65536
MAX_RULES = 250  # of a grammar, references of a schema: llguidance's time for a faulty chain of them is quadratic
LEXER_FUEL = 100_000  # some 0.2 s for the expressions of a grammar; llguidance's own bound is ten times as much
_STACK_BYTES = 256 * 2**20  # only what is used of it takes memory
_RULE = re.compile(r"^[ \t]*\??\w+(?:\.\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_stack_size_lock = threading.Lock()  # the size is the process's, not the thread's


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
        return LLGuidanceConstraint(self._compile(sampling.structured_outputs))

    def check(self, params: StructuredOutputsParams) -> None:
        """Raises ValueError as making a constraint does, or if a first token is too much for it already.

        Other threads run meanwhile.
        """
        matcher = self._compile(params)
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if mask:
            matcher.consume_token((mask & -mask).bit_length() - 1)
        if matcher.is_error():
            raise ValueError(f"structured_outputs: {_reason(matcher.get_error())}")

    def _compile(self, params: StructuredOutputsParams) -> Any:
        """An LLMatcher; building one releases the interpreter's lock."""
        from llguidance import LLMatcher, LLParserLimits

        vocabulary, grammar = self._vocabulary(), self._grammar(params)
        limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL)
        matcher = _with_large_stack(lambda: LLMatcher(vocabulary, grammar, log_level=0, limits=limits))
        if matcher.is_error():
            raise ValueError(f"structured_outputs: {_reason(matcher.get_error())}")
        return matcher

    def _vocabulary(self) -> Any:
        if self._compiled is None:
            from llguidance import LLTokenizer

            ends = list(self._tokenizer.eos_token_ids)
            self._compiled = LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=ends or None)
        return self._compiled

    def _grammar(self, params: StructuredOutputsParams) -> str:
        grammar = self._unchecked_grammar(params)
        size = len(grammar.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"structured_outputs: the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken")
        rules = len(_RULE.findall(params.grammar)) if params.grammar is not None else grammar.count('"$ref"')
        if rules > MAX_RULES:
            raise ValueError(f"structured_outputs: {rules} rules or references; at most {MAX_RULES} are taken")
        return grammar

    @staticmethod
    def _unchecked_grammar(params: StructuredOutputsParams) -> str:
        from llguidance import LLMatcher

        if params.json_object:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        if params.json is not None:
            schema = params.json
            if isinstance(schema, str):
                try:
                    schema = json.loads(schema)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"json is no JSON: {error}") from None
            if not isinstance(schema, Mapping):
                raise ValueError(f"json = {schema!r}: a JSON schema is an object")
            try:
                text = json.dumps(dict(schema))
            except (RecursionError, TypeError, ValueError) as error:
                raise ValueError(f"json is no JSON schema: {error}") from None
            return LLMatcher.grammar_from_json_schema(text)
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


def _with_large_stack(function: Callable[[], T]) -> T:
    """llguidance descends into rules and references by recursion; thousands of them overflow a usual stack."""
    results: list[T] = []
    with _stack_size_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=lambda: results.append(function()))
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return results[0]


def _reason(error: str) -> str:
    """The first line: what follows shows the grammar and the parser's state."""
    return error.strip().splitlines()[0] if error.strip() else "the grammar is not valid"

"""How a request's next token is drawn and when it stops; validated on construction."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .read_only import ReadOnlyDict
from .structured import StructuredOutputsParams


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping rules of one request, named as vLLM's users know them.

    Args:
        n: independent continuations of the prompt; continuation i draws with seed + i.
        temperature: 0 takes the most probable token; otherwise logits are divided by it.
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p, in (0, 1].
        min_p: drop tokens less probable than min_p times the most probable one, in [0, 1].
        repetition_penalty: > 1 discourages tokens seen in prompt or output (CTRL, arXiv:1909.05858).
        presence_penalty: subtracted once from the logit of every token in the output, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        seed: any integer; None lets the engine choose one from its own seed.
        stop: strings that end the output when they appear in it.
        stop_token_ids: token ids that end the output.
        ignore_eos: go on past the model's end-of-sequence token.
        min_tokens: no stop rule holds before that many output tokens.
        max_tokens: output tokens at most; None means up to the model's length.
        logprobs: log-probabilities of that many most probable tokens, and of the drawn one, per output token.
        prompt_logprobs: the same for every prompt token but the first.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        detokenize: whether text is made; without it stop strings are refused.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string in the text.
        structured_outputs: the form that the output must have.

    Raises:
        ValueError: a value is outside its range; the message names the field, the value and the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be True or False")
        try:
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
            stop_token_ids = tuple(self.stop_token_ids or ())
            logit_bias = {operator.index(k): float(v) for k, v in dict(self.logit_bias or {}).items()}
        except (TypeError, ValueError) as error:
            raise ValueError(f"stop, stop_token_ids: lists; logit_bias: token ids -> numbers; {error}") from error
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "logit_bias", ReadOnlyDict(logit_bias))
        self._integer("n", 1, 128)
        self._number("temperature", 0.0, math.inf)
        self._integer("top_k", -1, None)
        self._number("top_p", 0.0, 1.0, above=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, math.inf, above=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._integer("min_tokens", 0, None)
        if self.seed is not None:
            self._integer("seed", None, None)
        for name, low in (("max_tokens", 1), ("logprobs", 0), ("prompt_logprobs", 0)):
            if getattr(self, name) is not None:
                self._integer(name, low, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens = {self.min_tokens} is more than max_tokens = {self.max_tokens}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}; every stop must be a string that is not empty")
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            raise ValueError(f"structured_outputs = {form!r}: must be a StructuredOutputsParams")
        if stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True: they are looked for in the text")
        for token_id in self.stop_token_ids:
            if not isinstance(token_id, int) or token_id < 0:
                raise ValueError(f"stop_token_ids holds {token_id!r}; token ids are integers >= 0")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias[{token_id}] = {bias}: ids are >= 0 and values within [-100, 100]")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on which tokens came before it beyond what the model sees."""
        return self.needs_penalties or self.structured_outputs is not None

    def for_continuation(self, index: int, seed: int) -> SamplingParams:
        """The parameters of continuation `index` of n: one stream, its own seed."""
        return replace(self, n=1, seed=seed + index)

    def _integer(self, name: str, low: int | None, high: int | None) -> None:
        value = getattr(self, name)
        good = isinstance(value, int) and not isinstance(value, bool)
        if good and (low is None or value >= low) and (high is None or value <= high):
            return
        bounds = " and ".join(([f">= {low}"] if low is not None else []) + ([f"<= {high}"] if high is not None else []))
        raise ValueError(f"{name} = {value!r}: must be an integer {bounds}".rstrip())

    def _number(self, name: str, low: float, high: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if good and (value > low if above else value >= low) and value <= high:
            return
        lower = f"> {low:g}" if above else f">= {low:g}"
        upper = "" if high == math.inf else f" and <= {high:g}"
        raise ValueError(f"{name} = {value!r}: must be a finite number {lower}{upper}")

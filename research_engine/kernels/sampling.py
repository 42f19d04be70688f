"""Drawing the next token of every row of logits, without a sort."""

from __future__ import annotations

from typing import NamedTuple

import torch

from research_engine.kernels._checks import check_dtype, check_exactly, check_last_contiguous, check_rows, refuse
from research_engine.kernels._extension import _C, stream_of, traced

MAX_VOCAB_SIZE = 2**19
MAX_LOGPROBS = 1024


class Sampled(NamedTuple):
    """What `sample` gives, one entry a row.

    Attributes:
        token_ids: int64 `[S]`: the drawn token, or -1 where no token is left, -2 where a logit is NaN, -3 where one is
            +inf.
        logprobs: float32 `[S]`: natural logarithm of the token's probability under softmax of the logits as they came,
            before bias, penalties, mask, temperature and truncation; None unless asked for, as the rest.
        ranks: int64 `[S]`: the token's place in that distribution, from 1; 0 where there is no token.
        top_ids: int64 `[S, n]`: the n most probable tokens, by (probability, smaller id first); -1 past V.
        top_logprobs: float32 `[S, n]`: their log-probabilities.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    seen_tokens: torch.Tensor | None = None,
    seen_counts: torch.Tensor | None = None,
    seen_lengths: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    count_drawn: bool = False,
    bias_tokens: torch.Tensor | None = None,
    bias_values: torch.Tensor | None = None,
    allowed_tokens: torch.Tensor | None = None,
    num_logprobs: int | None = None,
    out: Sampled | None = None,
    workspace: torch.Tensor | None = None,
) -> Sampled:
    """Draws one token a row, each by its own parameters; a row does not depend on the rows around it.

    In this order: biases are added; tokens seen before are penalised; biases of -inf and the mask forbid. Temperature 0
    takes the largest logit, the smallest id on ties. Otherwise tokens weigh `exp((x - max x) / temperature)`, and kept
    are the first by (weight, smaller id) that min_p, then top_k, then top_p of the mass that is left allow, never less
    than one. Drawn is the token at which the running sum of kept weights, in the order of ids, first exceeds u times
    their total, `u = Philox4x32-10(seed, position)` (`executors/philox.py`). Weights are integers of 40 bits
    (`csrc/common/sampling_math.h`): the draw is the same token on every device.

    Args:
        logits: `[S, V]`, rows contiguous at any stride; not changed. V up to 524,288.
        temperature: float32 `[S]`, not negative.
        seeds: int64 `[S]`, any bits.
        positions: int64 `[S]`: the draw's number in its sequence.
        top_k: int32 `[S]`; below 1 or from V on: off.
        top_p: float32 `[S]`; from 1 on: off.
        min_p: float32 `[S]`: least weight, as a share of the largest; 0: off.
        repetition_penalty: float32 `[S]`: seen logits are divided by it where positive, multiplied where not; 1: off.
        presence_penalty: float32 `[S]`: subtracted for tokens of the output.
        frequency_penalty: float32 `[S]`: subtracted for tokens of the output, times their number there.
        seen_tokens: int32 `[slots, M]`, rows contiguous: a slot's distinct tokens, of prompt and output. Penalties,
            slots and what was seen are given together or not at all.
        seen_counts: int32, likewise: how often each is in the output; 0 for a token of the prompt alone.
        seen_lengths: int32 `[slots]`: how many tokens a slot lists.
        slots: int32 `[S]`: the slot of a row, -1 for none. No slot twice.
        count_drawn: enter each drawn token into its row's slot (a full slot takes no new token); seen_* change.
        bias_tokens: int32 `[S, K]`, rows contiguous: distinct ids a row, -1 for none; with bias_values.
        bias_values: float32 `[S, K]`, likewise: -inf forbids a token whatever else holds.
        allowed_tokens: int32 `[S, ceil(V / 32)]`, rows contiguous: a bit a token, lowest first; 0 forbids.
        num_logprobs: how many most probable tokens to name beside the drawn one's log-probability, up to 1,024; None
            for no log-probabilities.
        out: tensors to write into, as `Sampled` describes them, contiguous; made when None.
        workspace: CUDA, with penalties or biases: float32, contiguous, of `sample_workspace(...)` elements that may
            hold anything; made when None.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype the device's kernels do not take.
        ValueError: a shape, stride, device or value that breaks the rules above, or a part of a group that is missing.
            Values are checked on the CPU.
    """
    if out is None:
        out = _make_out(logits, num_logprobs)
    arguments = (
        logits, temperature, seeds, positions, top_k, top_p, min_p, repetition_penalty, presence_penalty,
        frequency_penalty, seen_tokens, seen_counts, seen_lengths, slots, count_drawn, bias_tokens, bias_values,
        allowed_tokens, num_logprobs, *out, workspace,
    )  # fmt: skip
    if traced(logits):
        torch.ops.research_engine.sample(*arguments)
    else:
        _sample(*arguments)
    return out


def sample_workspace(logits: torch.Tensor) -> int:
    """How many float32 elements `sample` needs as `workspace` for logits of this shape; 0 on the CPU."""
    if logits.is_cpu:
        return 0
    stream_of(logits)
    return _C.sample_workspace(logits.shape[0], logits.shape[1], logits.get_device())


def _make_out(logits: torch.Tensor, num_logprobs: int | None) -> Sampled:
    rows = logits.shape[0]

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    if num_logprobs is None:
        return Sampled(empty(rows))
    chosen = Sampled(empty(rows), empty(rows, dtype=torch.float32), empty(rows))
    if num_logprobs <= 0:
        return chosen
    top = empty(rows, num_logprobs), empty(rows, num_logprobs, dtype=torch.float32)
    return chosen._replace(top_ids=top[0], top_logprobs=top[1])


def _together(rule: str, **group: torch.Tensor | None) -> bool:
    """Whether a group of arguments is given; some alone are refused."""
    missing = [name for name, tensor in group.items() if tensor is None]
    if missing and len(missing) < len(group):
        given = [name for name in group if name not in missing]
        raise ValueError(f"{', '.join(missing)}: missing beside {', '.join(given)}; {rule}")
    return not missing


def _check(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    repetition_penalty: torch.Tensor | None,
    presence_penalty: torch.Tensor | None,
    frequency_penalty: torch.Tensor | None,
    seen_tokens: torch.Tensor | None,
    seen_counts: torch.Tensor | None,
    seen_lengths: torch.Tensor | None,
    slots: torch.Tensor | None,
    count_drawn: bool,
    bias_tokens: torch.Tensor | None,
    bias_values: torch.Tensor | None,
    allowed_tokens: torch.Tensor | None,
    num_logprobs: int | None,
    token_ids: torch.Tensor,
    logprobs: torch.Tensor | None,
    ranks: torch.Tensor | None,
    top_ids: torch.Tensor | None,
    top_logprobs: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    check_dtype("logits", logits)
    if logits.dim() != 2 or not 0 < logits.shape[1] <= MAX_VOCAB_SIZE:
        refuse("logits", logits, f"the shape has to be [S, V], V from 1 to {MAX_VOCAB_SIZE}")
    check_last_contiguous("logits", logits)
    rows = logits.shape[:1]
    floats = {
        "temperature": temperature,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logprobs": logprobs,
    }
    integers = {"seeds": seeds, "positions": positions, "token_ids": token_ids, "ranks": ranks}
    for name, tensor in floats.items():
        if tensor is not None:
            _check_column(name, tensor, torch.float32, rows)
    for name, tensor in integers.items():
        if tensor is not None:
            _check_column(name, tensor, torch.int64, rows)
    for name, tensor in (("top_k", top_k), ("slots", slots)):
        if tensor is not None:
            _check_column(name, tensor, torch.int32, rows)
    if _together(
        "penalties, slots and seen tokens belong together",
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        seen_tokens=seen_tokens, seen_counts=seen_counts, seen_lengths=seen_lengths, slots=slots,
    ):  # fmt: skip
        _check_lists("seen_tokens", seen_tokens, torch.int32, None, "[slots, M]")
        assert seen_tokens is not None and seen_lengths is not None
        _check_lists("seen_counts", seen_counts, torch.int32, seen_tokens.shape, "seen_tokens', [slots, M]")
        if seen_counts is not None and seen_counts.stride(0) != seen_tokens.stride(0) and len(seen_tokens) > 1:
            refuse(
                "seen_counts", seen_counts, f"its rows have to lie as seen_tokens' do, {seen_tokens.stride(0)} apart"
            )
        check_exactly("seen_lengths", seen_lengths, torch.int32, seen_tokens.shape[:1], "[slots]")
    elif count_drawn:
        raise ValueError("count_drawn=True: there are no seen_tokens to enter the drawn ones into")
    if _together("biases need both", bias_tokens=bias_tokens, bias_values=bias_values):
        assert bias_tokens is not None and bias_values is not None
        _check_lists("bias_tokens", bias_tokens, torch.int32, None, "[S, K]")
        if bias_tokens.shape[0] != rows[0]:
            refuse("bias_tokens", bias_tokens, f"the shape has to be [S, K], S = {rows[0]}")
        _check_lists("bias_values", bias_values, torch.float32, bias_tokens.shape, "bias_tokens', [S, K]")
        if bias_values.stride(0) != bias_tokens.stride(0) and rows[0] > 1:
            refuse(
                "bias_values", bias_values, f"its rows have to lie as bias_tokens' do, {bias_tokens.stride(0)} apart"
            )
    if allowed_tokens is not None:
        _check_lists(
            "allowed_tokens", allowed_tokens, torch.int32, (rows[0], -(-logits.shape[1] // 32)), "[S, ceil(V / 32)]"
        )
    _check_logprobs(num_logprobs, rows[0], logprobs, ranks, top_ids, top_logprobs)
    if workspace is not None and (workspace.dtype != torch.float32 or not workspace.is_contiguous()):
        refuse("workspace", workspace, "it has to be float32 and contiguous")


def _check_column(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> None:
    check_exactly(name, tensor, dtype, shape, "[S]")


def _check_lists(
    name: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...] | None, letters: str
) -> None:
    assert tensor is not None
    if tensor.dim() != 2:
        refuse(name, tensor, f"the shape has to be {letters}")
    check_rows(name, tensor, dtype, shape or tensor.shape, letters)


def _check_logprobs(
    num_logprobs: int | None,
    rows: int,
    logprobs: torch.Tensor | None,
    ranks: torch.Tensor | None,
    top_ids: torch.Tensor | None,
    top_logprobs: torch.Tensor | None,
) -> None:
    if num_logprobs is not None and not 0 <= num_logprobs <= MAX_LOGPROBS:
        raise ValueError(f"num_logprobs={num_logprobs}; it has to be 0 to {MAX_LOGPROBS}, or None")
    wanted = {
        "logprobs": (logprobs, num_logprobs is not None),
        "ranks": (ranks, num_logprobs is not None),
        "top_ids": (top_ids, bool(num_logprobs)),
        "top_logprobs": (top_logprobs, bool(num_logprobs)),
    }
    for name, (tensor, needed) in wanted.items():
        if (tensor is not None) != needed:
            state = "missing" if needed else "given"
            raise ValueError(f"out.{name}: {state}, with num_logprobs={num_logprobs}")
    if top_ids is not None and top_logprobs is not None:
        shape = (rows, num_logprobs or 0)
        check_exactly("top_ids", top_ids, torch.int64, shape, "[S, num_logprobs]")
        check_exactly("top_logprobs", top_logprobs, torch.float32, shape, "[S, num_logprobs]")


def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    repetition_penalty: torch.Tensor | None,
    presence_penalty: torch.Tensor | None,
    frequency_penalty: torch.Tensor | None,
    seen_tokens: torch.Tensor | None,
    seen_counts: torch.Tensor | None,
    seen_lengths: torch.Tensor | None,
    slots: torch.Tensor | None,
    count_drawn: bool,
    bias_tokens: torch.Tensor | None,
    bias_values: torch.Tensor | None,
    allowed_tokens: torch.Tensor | None,
    num_logprobs: int | None,
    token_ids: torch.Tensor,
    logprobs: torch.Tensor | None,
    ranks: torch.Tensor | None,
    top_ids: torch.Tensor | None,
    top_logprobs: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    _check(
        logits, temperature, seeds, positions, top_k, top_p, min_p, repetition_penalty, presence_penalty,
        frequency_penalty, seen_tokens, seen_counts, seen_lengths, slots, count_drawn, bias_tokens, bias_values,
        allowed_tokens, num_logprobs, token_ids, logprobs, ranks, top_ids, top_logprobs, workspace,
    )  # fmt: skip
    stream = stream_of(logits)
    if workspace is None and not logits.is_cpu and (seen_tokens is not None or bias_tokens is not None):
        workspace = torch.empty(sample_workspace(logits), dtype=torch.float32, device=logits.device)
    _C.sample(
        logits, temperature, seeds, positions, top_k, top_p, min_p, repetition_penalty, presence_penalty,
        frequency_penalty, seen_tokens, seen_counts, seen_lengths, slots, count_drawn, bias_tokens, bias_values,
        allowed_tokens, token_ids, logprobs, ranks, top_ids, top_logprobs, workspace, stream,
    )  # fmt: skip


_sample_op = torch.library.custom_op(
    "research_engine::sample",
    _sample,
    mutates_args=(
        "seen_tokens", "seen_counts", "seen_lengths", "token_ids", "logprobs", "ranks", "top_ids", "top_logprobs",
        "workspace",
    ),
    schema=(
        "(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions, Tensor? top_k, Tensor? top_p, "
        "Tensor? min_p, Tensor? repetition_penalty, Tensor? presence_penalty, Tensor? frequency_penalty, "
        "Tensor(a!)? seen_tokens, Tensor(b!)? seen_counts, Tensor(c!)? seen_lengths, Tensor? slots, bool count_drawn, "
        "Tensor? bias_tokens, Tensor? bias_values, Tensor? allowed_tokens, int? num_logprobs, Tensor(d!) token_ids, "
        "Tensor(e!)? logprobs, Tensor(f!)? ranks, Tensor(g!)? top_ids, Tensor(h!)? top_logprobs, "
        "Tensor(i!)? workspace) -> ()"
    ),
)  # fmt: skip
_sample_op.register_fake(_check)

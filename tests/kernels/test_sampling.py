"""Sampling draws what the float64 distribution says, the same token on every device, whatever the rows around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from research_engine import kernels
from research_engine.executors.philox import uniform
from research_engine.kernels._checks import CPU_DTYPES, CUDA_DTYPES

INF = torch.inf
DTYPES = {"cpu": CPU_DTYPES, "cuda": CUDA_DTYPES}
CLOSE = 2e-5  # of a running sum: weights are right to 2e-7, changed logits to a rounding of float32
property_test = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def on(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def draw(device: str, logits: torch.Tensor, **arguments: Any) -> kernels.Sampled:
    """One token a row, from CPU arguments; temperature 1, seeds and positions by row unless given."""
    rows = logits.shape[0]
    defaults = {
        "temperature": torch.ones(rows),
        "seeds": torch.arange(rows) * 7919 - 3,
        "positions": torch.arange(rows) + 5,
    }
    out = kernels.sample(logits.to(device), **on(device, {**defaults, **arguments}))
    return kernels.Sampled(*(tensor if tensor is None else tensor.cpu() for tensor in out))


def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@st.composite
def arguments(draw_: st.DrawFn, rows: int, vocab_size: int, generator: torch.Generator) -> dict[str, Any]:
    """Temperatures and truncations, penalties, biases and a mask, each there or not."""

    def each(strategy: st.SearchStrategy[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([draw_(strategy) for _ in range(rows)], dtype=dtype)

    def distinct(count: int, width: int) -> torch.Tensor:
        return torch.stack(
            [torch.randperm(max(vocab_size, width), generator=generator)[:width] for _ in range(count)]
        ).int()

    result: dict[str, Any] = {"temperature": each(st.sampled_from((0.0, 0.3, 1.0, 1.7, 40.0)))}
    if draw_(st.booleans()):
        result["top_k"] = each(st.sampled_from((0, 1, 2, 50, vocab_size // 2, vocab_size)), torch.int32)
    if draw_(st.booleans()):
        result["top_p"] = each(st.sampled_from((1.0, 0.9, 0.5, 0.0)))
    if draw_(st.booleans()):
        result["min_p"] = each(st.sampled_from((0.0, 0.05, 0.7)))
    if draw_(st.booleans()):
        slots, width = rows + 2, draw_(st.sampled_from((1, 6, 40)))
        result |= {
            "repetition_penalty": each(st.sampled_from((1.0, 1.3, 0.6))),
            "presence_penalty": each(st.sampled_from((0.0, 0.7, -1.0))),
            "frequency_penalty": each(st.sampled_from((0.0, 0.4))),
            "seen_tokens": distinct(slots, width),
            "seen_counts": torch.randint(0, 4, (slots, width), generator=generator).int(),
            "seen_lengths": torch.randint(0, width + 1, (slots,), generator=generator).int(),
            "slots": (torch.randperm(slots, generator=generator)[:rows] - 1).int(),
        }
    if draw_(st.booleans()):
        width = draw_(st.sampled_from((1, 5)))
        values = torch.randn(rows, width, generator=generator) * 4
        values[torch.rand(rows, width, generator=generator) < 0.3] = -INF
        result |= {"bias_tokens": distinct(rows, width) - 1, "bias_values": values}
    if draw_(st.booleans()):
        words = torch.randint(-(2**31), 2**31, (rows, -(-vocab_size // 32)), generator=generator)
        result["allowed_tokens"] = words.int()
    return result


@property_test
@given(data=st.data(), rows=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_the_drawn_token_is_the_one_that_u_falls_on(device: str, data: st.DataObject, rows: int, seed: int) -> None:
    vocab_size = data.draw(st.sampled_from((1, 2, 31, 32, 33, 257, 1000, 5003)) | st.integers(1, 600))
    generator = torch.Generator().manual_seed(seed)
    spread = data.draw(st.sampled_from((1.0, 6.0)))
    logits = torch.randn(rows, vocab_size, generator=generator) * spread
    logits = logits.to(data.draw(st.sampled_from(DTYPES[device])))
    given_ = data.draw(arguments(rows, vocab_size, generator))
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 10**6, (rows,), generator=generator)
    tokens = draw(device, logits, seeds=seeds, positions=positions, **given_).token_ids
    distribution = kernels.reference.sampling_distribution(logits, **given_)
    us = uniform(seeds.tolist(), positions.tolist())
    for row, token in enumerate(tokens.tolist()):
        if distribution[row].sum() == 0:
            assert token == -1
            continue
        until = distribution[row].cumsum(0)[token]
        before = until - distribution[row, token]
        # A token may be kept or not by a rounding of top_p's mass, which shifts the sums by its own weight.
        shift = 0.0 if "top_p" not in given_ else float(distribution[row][distribution[row] > 0].min()) + CLOSE
        assert before - CLOSE - shift <= us[row] <= until + CLOSE + shift, (row, token)


@pytest.mark.parametrize("vocab_size", [7, 1000, 49_152])
def test_tokens_are_those_of_the_float64_sampler(device: str, vocab_size: int) -> None:
    logits = torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    prompt, output = [1, 2, 3, 3], [2, 5, 5, 6]
    choices = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.75},
        {"temperature": 1.0, "min_p": 0.125},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.5, "min_p": 0.0625},
        {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.5},
        {"temperature": 2.0, "logit_bias": {0: 3.0, 4: -2.0}},
    ]
    params = [choices[row % len(choices)] for row in range(24)]

    def values(name: str, default: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([p.get(name, default) for p in params], dtype=dtype)  # type: ignore[attr-defined]

    slots = torch.arange(24).int()
    biases = [list(p.get("logit_bias", {}).items()) + [(-1, 0.0)] * 2 for p in params]  # type: ignore[attr-defined]
    shaping: dict[str, Any] = {
        "temperature": values("temperature", 0.0),
        "top_k": values("top_k", 0, torch.int32),
        "top_p": values("top_p", 1.0),
        "min_p": values("min_p", 0.0),
        "repetition_penalty": values("repetition_penalty", 1.0),
        "presence_penalty": values("presence_penalty", 0.0),
        "frequency_penalty": values("frequency_penalty", 0.0),
        "seen_tokens": torch.tensor([[1, 2, 3, 5, 6]] * 24).int(),
        "seen_counts": torch.tensor([[0, 1, 0, 2, 1]] * 24).int(),
        "seen_lengths": torch.full((24,), 5).int(),
        "slots": slots,
        "bias_tokens": torch.tensor([[token for token, _ in row[:2]] for row in biases]).int(),
        "bias_values": torch.tensor([[value for _, value in row[:2]] for row in biases]),
    }
    seeds = torch.tensor([row * 101 for row in range(24)])
    positions = torch.full((24,), len(prompt) + len(output))
    drawn = draw(device, logits, seeds=seeds, positions=positions, num_logprobs=4, **shaping)
    running = kernels.reference.sampling_distribution(logits, **shaping).cumsum(-1)
    us = torch.from_numpy(uniform(seeds.tolist(), positions.tolist())).unsqueeze(-1)
    assert drawn.token_ids.tolist() == (running <= us * running[:, -1:]).sum(-1).tolist()


@pytest.mark.parametrize(
    ("rows", "vocab_size", "dtype"),
    # on a GPU: a row over eight thread blocks, four, one that has room for it, and more than shared memory holds
    [
        (12, 131_072, torch.bfloat16),
        (40, 32_000, torch.float32),
        (400, 2_000, torch.float32),
        (2, 524_288, torch.float32),
    ],
)
def test_every_device_draws_the_same(device: str, rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(rows, vocab_size, generator=generator) * 3).to(dtype)
    given_: dict[str, Any] = {
        "temperature": torch.rand(rows, generator=generator) * 2,
        "top_k": (torch.arange(rows) % 4 * 700).int(),
        "top_p": torch.arange(rows) % 3 * 0.4 + 0.2,
        "num_logprobs": 5,
    }
    here, there = draw(device, logits, **given_), draw("cpu", logits, **given_)
    for name in ("token_ids", "ranks", "top_ids"):
        assert torch.equal(getattr(here, name), getattr(there, name)), name
    torch.testing.assert_close(here.logprobs, there.logprobs, rtol=1e-6, atol=1e-6)


def drawn_set(device: str, logits: list[float], num_seeds: int = 200, **arguments: float) -> set[int]:
    rows = torch.tensor([logits] * num_seeds)
    whole = {"top_k": torch.int32}
    given_ = {name: torch.full((num_seeds,), v, dtype=whole.get(name, torch.float32)) for name, v in arguments.items()}
    return set(draw(device, rows, seeds=torch.arange(num_seeds), **given_).token_ids.tolist())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"top_k": 2}, {0, 1}),  # three tie at the boundary: the smaller ids stay
        ({"top_k": 1, "top_p": 0.8}, {0}),
        ({"top_p": 1e-9}, {0}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 1.0}, {0, 1, 2}),
        ({"top_p": 0.9999999}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),  # top_p is of the mass that top_k leaves
        ({"temperature": 1e-30}, {0, 1, 2}),
        ({"temperature": 1e30, "top_k": 4}, {0, 1, 2, 3}),
    ],
)
def test_k28_ties_and_edges_of_truncation(device: str, arguments: dict[str, float], expected: set[int]) -> None:
    assert drawn_set(device, [1.0, 1.0, 1.0, 0.0], **arguments) == expected


@pytest.mark.parametrize("arguments", [{}, {"top_k": 1}, {"top_p": 0.9999999}, {"min_p": 0.5}, {"temperature": 0.0}])
def test_k28_one_possible_token_is_drawn(device: str, arguments: dict[str, float]) -> None:
    assert drawn_set(device, [-INF, -INF, 3.0, -INF], num_seeds=20, **arguments) == {2}


@pytest.mark.parametrize("vocab_size", [100, 40_000])
def test_k28_ties_at_the_cut_are_kept_by_id(device: str, vocab_size: int) -> None:
    kept = vocab_size // 3
    top_k = torch.full((300,), kept, dtype=torch.int32)
    tokens = draw(device, torch.zeros(300, vocab_size), top_k=top_k, seeds=torch.arange(300)).token_ids
    assert tokens.min() >= 0 and tokens.max() < kept
    assert tokens.max() > 0.9 * kept and len(set(tokens.tolist())) > 25


def test_k27_repetition_looks_at_prompt_and_output_and_the_others_at_the_output(device: str) -> None:
    def greedy(**penalties: float) -> int:
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        values = {name: column([penalties.get(name, 1.0 if name.startswith("rep") else 0.0)]) for name in names}
        seen = {
            "seen_tokens": column([[0, 1]], torch.int32), "seen_counts": column([[0, 3]], torch.int32),
            "seen_lengths": column([2], torch.int32), "slots": column([0], torch.int32),
        }  # fmt: skip
        logits = torch.tensor([[3.0, 2.9, 2.8]])
        return int(draw(device, logits, temperature=torch.zeros(1), **values, **seen).token_ids)

    assert greedy() == 0
    assert greedy(repetition_penalty=1.05) == 0  # both seen tokens shrink alike, token 2 stays behind
    assert greedy(repetition_penalty=1.1) == 2
    assert greedy(presence_penalty=1.0) == 0  # token 0 is in the prompt alone
    assert greedy(presence_penalty=-0.15) == 1
    assert greedy(frequency_penalty=-0.05) == 1


def test_drawn_tokens_are_counted_in_their_slots(device: str) -> None:
    state = {
        "seen_tokens": torch.tensor([[7, 2, 9], [1, 0, 0], [5, 6, 3]]).int(),
        "seen_counts": torch.tensor([[0, 1, 8], [0, 0, 0], [1, 1, 1]]).int(),
        "seen_lengths": torch.tensor([2, 1, 3]).int(),
    }
    state = on(device, state)
    penalties = {name: torch.zeros(4) for name in ("presence_penalty", "frequency_penalty")}
    logits = torch.full((4, 10), -5.0)
    for row, token in enumerate((2, 4, 8, 1)):
        logits[row, token] = 5.0
    tokens = draw(
        device, logits, temperature=torch.zeros(4), repetition_penalty=torch.ones(4), **penalties, **state,
        slots=torch.tensor([0, 1, 2, -1]).int(), count_drawn=True,
    ).token_ids  # fmt: skip
    assert tokens.tolist() == [2, 4, 8, 1]
    assert state["seen_lengths"].tolist() == [2, 2, 3], "a full slot takes no new token"
    assert state["seen_tokens"].tolist() == [[7, 2, 9], [1, 4, 0], [5, 6, 3]]
    assert state["seen_counts"].tolist() == [[0, 2, 8], [0, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(("value", "status"), [(torch.nan, -2), (INF, -3), (-INF, -1)])
def test_rows_without_a_token_say_why_and_leave_the_others_alone(device: str, value: float, status: int) -> None:
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(0))
    expected = draw(device, logits, num_logprobs=3)
    if value == -INF:
        logits[1] = value
    else:
        logits[1, 2999] = value
    actual = draw(device, logits, num_logprobs=3)
    assert actual.token_ids[1] == status and actual.ranks[1] == 0 and actual.top_ids[1].tolist() == [-1] * 3
    for before, after in zip(expected, actual, strict=True):
        assert torch.equal(before[[0, 2]], after[[0, 2]])


@property_test
@given(data=st.data(), rows=st.integers(1, 3), seed=st.integers(0, 10**6), wanted=st.sampled_from((0, 1, 5, 20)))
def test_logprobs_are_of_the_logits_as_they_came(
    device: str, data: st.DataObject, rows: int, seed: int, wanted: int
) -> None:
    vocab_size = data.draw(st.sampled_from((1, 4, 33, 1000, 6000)))
    generator = torch.Generator().manual_seed(seed)
    kind = data.draw(st.sampled_from(("normal", "ties", "peaked", "mostly forbidden")))
    logits = torch.randn(rows, vocab_size, generator=generator)
    if kind == "ties":
        logits = logits.round()
    if kind == "peaked":
        logits[:, vocab_size // 2] += 1e3
    if kind == "mostly forbidden":
        logits[:, 3:] = -INF
    given_ = data.draw(arguments(rows, vocab_size, generator))
    drawn = draw(device, logits, num_logprobs=wanted, **given_)
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    ids = torch.arange(vocab_size)
    for row, token in enumerate(drawn.token_ids.tolist()):
        if token < 0:
            continue
        x = logits[row]
        assert drawn.logprobs is not None and drawn.ranks is not None
        torch.testing.assert_close(drawn.logprobs[row].double(), logprobs[row, token], rtol=1e-6, atol=1e-6)
        assert drawn.ranks[row] == 1 + int(((x > x[token]) | ((x == x[token]) & (ids < token))).sum())
        if wanted:
            assert drawn.top_ids is not None and drawn.top_logprobs is not None
            order = torch.sort(x, descending=True, stable=True).indices[:wanted]
            count = len(order)
            assert drawn.top_ids[row, :count].tolist() == order.tolist()
            torch.testing.assert_close(
                drawn.top_logprobs[row, :count].double(), logprobs[row, order], rtol=1e-6, atol=1e-6
            )
            assert drawn.top_ids[row, count:].tolist() == [-1] * (wanted - count)


def test_one_row_may_lie_anywhere_whatever_its_stride(device: str) -> None:
    """Columns of a wider list, beside values that are not: a stride of rows says nothing where there is one."""
    logits, wide = torch.randn(1, 50), torch.arange(40, dtype=torch.int32)[None]
    values = torch.tensor([[9.0, -9.0]])
    expected = draw(device, logits, bias_tokens=wide[:, :2].clone(), bias_values=values)
    actual = draw(device, logits, bias_tokens=wide[:, :2], bias_values=values)
    assert torch.equal(actual.token_ids, expected.token_ids)


def test_a_row_does_not_depend_on_its_neighbours_or_its_stride(device: str) -> None:
    logits = torch.randn(300, 1000, generator=torch.Generator().manual_seed(1))
    options = {"seeds": torch.full((300,), 4), "top_p": torch.full((300,), 0.8)}
    together = draw(device, logits, **options).token_ids
    alone = draw(device, logits[211:212], positions=torch.tensor([216]), seeds=torch.tensor([4]), top_p=column([0.8]))
    assert together[211] == alone.token_ids[0]
    wide = torch.full((300, 1003), torch.nan)
    wide[:, 1:1001] = logits
    assert torch.equal(draw(device, wide[:, 1:1001], **options).token_ids, together)


def test_draws_follow_the_distribution(device: str) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0]).expand(20_000, 5)
    tokens = draw(
        device, logits, seeds=torch.zeros(20_000, dtype=torch.int64), positions=torch.arange(20_000)
    ).token_ids
    expected = torch.softmax(logits[0].double(), dim=0)
    actual = tokens.bincount(minlength=5) / 20_000
    assert (actual - expected).abs().max() < 0.012  # three standard deviations


@pytest.mark.gpu
def test_k18_a_captured_call_draws_by_what_its_tensors_hold(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 4000, generator=generator).cuda()
    given_ = on(
        "cuda",
        {
            "temperature": torch.ones(5), "seeds": torch.arange(5), "positions": torch.zeros(5, dtype=torch.int64),
            "top_k": torch.zeros(5, dtype=torch.int32), "top_p": torch.ones(5),
        },
    )  # fmt: skip
    out = kernels.sample(logits, **given_)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.sample(logits, **given_, out=out)
    for step in range(3):
        logits.copy_(torch.randn(5, 4000, generator=generator))
        given_["positions"].fill_(step)
        given_["top_k"].fill_(step * 30)
        given_["top_p"].fill_(1.0 - 0.3 * step)
        out.token_ids.fill_(-9)
        graph.replay()
        assert torch.equal(out.token_ids, kernels.sample(logits, **given_).token_ids)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"logits": torch.zeros(3)}, ValueError, r"logits: shape \[3\].*\[S, V\]"),
        ({"logits": torch.zeros(2, 4, dtype=torch.float64)}, TypeError, "logits: torch.float64"),
        ({"temperature": torch.ones(3)}, ValueError, r"temperature: shape \[3\].*\[S\] = \[2\]"),
        ({"top_k": torch.ones(2)}, TypeError, "top_k: torch.float32; torch.int32 is needed"),
        ({"seeds": torch.ones(2).int()}, TypeError, "seeds: torch.int32; torch.int64 is needed"),
        ({"slots": torch.zeros(2).int()}, ValueError, "missing beside slots"),
        ({"count_drawn": True}, ValueError, "no seen_tokens"),
        ({"bias_tokens": torch.zeros(2, 1).int()}, ValueError, "bias_values: missing beside bias_tokens"),
        ({"allowed_tokens": torch.zeros(2, 2).int()}, ValueError, r"allowed_tokens: .*ceil\(V / 32\)\] = \[2, 1\]"),
        ({"num_logprobs": -1}, ValueError, "num_logprobs=-1"),
        ({"num_logprobs": 2, "out": kernels.Sampled(torch.zeros(2).long())}, ValueError, r"out\.logprobs: missing"),
    ],
)
def test_wrong_arguments_are_named(device: str, change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {
        "logits": torch.zeros(2, 4), "temperature": torch.ones(2), "seeds": torch.zeros(2).long(),
        "positions": torch.zeros(2).long(),
    }  # fmt: skip
    arguments = on(device, {**arguments, **change})
    if "out" in change:
        arguments["out"] = kernels.Sampled(torch.zeros(2, device=device).long())
    with pytest.raises(error, match=words):
        kernels.sample(**arguments)


def test_values_out_of_range_are_named_on_the_cpu() -> None:
    arguments = {"seeds": torch.zeros(2).long(), "positions": torch.zeros(2).long()}
    with pytest.raises(ValueError, match=r"temperature\[1\] is -1, expected 0 \(greedy\) or more"):
        kernels.sample(torch.zeros(2, 4), column([1.0, -1.0]), **arguments)

"""Inputs of each op that the kernels' benchmark times, the check of its results, and the same by other means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from research_engine import kernels
from research_engine.bench import kernel_peers
from research_engine.bench.kernel_peers import AttentionInputs
from research_engine.bench.kernel_timing import Results, Run
from research_engine.executors.philox import uniform
from research_engine.kernels import reference

Sizes = Mapping[str, int]  # of a shape, by the names of the op's form

SAMPLED_ROWS = 64  # of an op whose rows the oracle computes quickly
SAMPLED_QUERIES = 3  # rows of attention
SAMPLED_COLUMNS = 256  # of a product
# Relative error of a row: a few times the rounding of results, and of attention's probabilities, to the dtype.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS = 1e-5


@dataclass(frozen=True)
class Setting:
    """Where and with what a problem is made."""

    device: torch.device
    dtype: torch.dtype
    path: str
    seed: int = 0
    split_size: int | None = None  # of attention: keys that one work item takes; None lets the kernel choose

    def generator(self) -> torch.Generator:
        """A fresh one of this setting's device and seed."""
        return torch.Generator(self.device).manual_seed(self.seed)


@dataclass(frozen=True)
class Problem:
    """One case, ready to run.

    Attributes:
        run: the project's kernel; returns its results, which may be arguments that it changed.
        reset: restores what `run` changed and fills what it writes with NaN, before a run that is checked.
        error: largest relative error of sampled rows of such results against the float64 oracle.
        tolerance: what that error may be.
        peers: makers of the same by other means, by name.
        capturable: whether it can be a CUDA graph.
    """

    run: Run
    reset: Callable[[], None]
    error: Callable[[Results], float]
    tolerance: float
    peers: Mapping[str, Callable[[], Run]] = field(default_factory=dict)
    capturable: bool = True


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest, over rows along the last dimension, of `|actual - expected| / |expected|` in Euclidean norms."""
    difference = (actual.double() - expected.double()).norm(dim=-1)
    return float((difference / expected.double().norm(dim=-1).clamp_min(1e-30)).max())


def sample(count: int, limit: int, setting: Setting) -> torch.Tensor:
    """At most `limit` of `[0, count)` on the device, ascending: the first, the last, and random ones between."""
    if count <= limit:
        return torch.arange(count, device=setting.device)
    between = torch.randperm(count - 2, device=setting.device, generator=setting.generator())[: limit - 2] + 1
    return torch.cat((between, torch.tensor([0, count - 1], device=setting.device))).sort().values


def make_attention(sizes: Sizes, setting: Setting, cache_dtype: torch.dtype | None = None) -> Problem:
    """Requests of one length over a cache, of float8 or int8 if asked, whose blocks lie in random order."""
    batch, queries, keys, head_size = sizes["B"], sizes.get("q", 1), sizes["L"], sizes["D"]
    device, random = setting.device, setting.generator()
    per_request = -(-keys // sizes["block"])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=setting.dtype, device=device, generator=random)

    cache_shape = (batch * per_request, sizes["Hkv"], sizes["block"], head_size)
    blocks = torch.randperm(cache_shape[0], dtype=torch.int32, device=device, generator=random)
    inputs = AttentionInputs(
        query=normal(batch * queries, sizes["Hq"], head_size),
        key_cache=normal(*cache_shape).to(cache_dtype or setting.dtype),
        value_cache=normal(*cache_shape).to(cache_dtype or setting.dtype),
        block_tables=blocks.view(batch, per_request),
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=device) * queries,
        seq_lens=torch.full((batch,), keys, dtype=torch.int32, device=device),
        queries=queries,
        keys=keys,
        scale=head_size**-0.5,
    )
    out = torch.empty_like(inputs.query)
    workspace = None
    if device.type == "cuda":
        size = kernels.paged_attention_workspace(
            inputs.query,
            inputs.key_cache,
            inputs.block_tables,
            path=setting.path,
            split_size=setting.split_size,
            max_query_len=queries,
            max_seq_len=keys,
        )
        workspace = torch.zeros(size, dtype=torch.float32, device=device) if size else None
    arguments = (
        inputs.query, inputs.key_cache, inputs.value_cache, inputs.block_tables, inputs.query_start_loc,
        inputs.seq_lens,
    )  # fmt: skip

    def run() -> Results:
        kernels.paged_attention(
            *arguments,
            scale=inputs.scale,
            out=out,
            path=setting.path,
            split_size=setting.split_size,
            workspace=workspace,
            max_query_len=queries,
            max_seq_len=keys,
        )
        return (out,)

    rows = sample(batch * queries, SAMPLED_QUERIES, setting)
    expected = _oracle_rows(inputs, rows)
    return Problem(
        run,
        reset=lambda: _poison(out),
        error=lambda results: relative_error(results[0].reshape(out.shape)[rows], expected),
        tolerance=TOLERANCES[setting.dtype],
        peers={}
        if cache_dtype is not None
        else {
            "torch": lambda: kernel_peers.sdpa(inputs),
            "FlashInfer": lambda: kernel_peers.flashinfer(inputs),
            "FlashAttention-3": lambda: kernel_peers.flash_attention_3(inputs),
        },
    )


def make_float8_attention(sizes: Sizes, setting: Setting) -> Problem:
    """The same over a cache of float8_e4m3fn, scales of one."""
    return make_attention(sizes, setting, torch.float8_e4m3fn)


def _oracle_rows(inputs: AttentionInputs, rows: torch.Tensor) -> torch.Tensor:
    """The oracle's result for some of the rows, each as a request of its own that ends where the row's sight does."""
    requests, places = rows // inputs.queries, rows % inputs.queries
    return reference.paged_attention(
        inputs.query[rows],
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_tables[requests],
        torch.arange(len(rows) + 1),
        inputs.keys - inputs.queries + places + 1,
        scale=inputs.scale,
    )


def _poison(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan"))


def make_rms_norm(sizes: Sizes, setting: Setting) -> Problem:
    """Rows of a residual stream."""
    x, weight = _normals(setting, (sizes["T"], sizes["H"]), (sizes["H"],))
    out, rows = torch.empty_like(x), sample(sizes["T"], SAMPLED_ROWS, setting)
    expected = reference.rms_norm(x[rows], weight, EPS)

    def run() -> Results:
        kernels.rms_norm(x, weight, EPS, out=out)
        return (out,)

    def by_torch() -> Results:
        return (functional.rms_norm(x, weight.shape, weight, EPS),)

    return Problem(
        run,
        reset=lambda: _poison(out),
        error=lambda results: relative_error(results[0][rows], expected),
        tolerance=TOLERANCES[setting.dtype],
        peers={"torch": lambda: by_torch},
    )


def make_fused_add_rms_norm(sizes: Sizes, setting: Setting) -> Problem:
    """The same, with the addition before it; both arguments change at every run."""
    shape = (sizes["T"], sizes["H"])
    x, residual, weight = _normals(setting, shape, shape, shape[1:])
    before, rows = (x.clone(), residual.clone()), sample(sizes["T"], SAMPLED_ROWS, setting)
    normed, summed = x[rows], residual[rows]
    reference.fused_add_rms_norm(normed, summed, weight, EPS)

    def run() -> Results:
        kernels.fused_add_rms_norm(x, residual, weight, EPS)
        return x, residual

    def by_torch() -> Results:
        residual.add_(x)
        return functional.rms_norm(residual, weight.shape, weight, EPS), residual

    def reset() -> None:
        x.copy_(before[0])
        residual.copy_(before[1])

    return Problem(
        run,
        reset,
        error=lambda results: max(relative_error(results[0][rows], normed), relative_error(results[1][rows], summed)),
        tolerance=TOLERANCES[setting.dtype],
        peers={"torch": lambda: by_torch},
    )


def make_silu_and_mul(sizes: Sizes, setting: Setting) -> Problem:
    """Gate and up of a feed-forward layer side by side."""
    (x,) = _normals(setting, (sizes["T"], 2 * sizes["I"]))
    out = torch.empty(sizes["T"], sizes["I"], dtype=setting.dtype, device=setting.device)
    rows = sample(sizes["T"], SAMPLED_ROWS, setting)
    expected = reference.silu_and_mul(x[rows])

    def run() -> Results:
        kernels.silu_and_mul(x, out=out)
        return (out,)

    def by_torch() -> Results:
        gate, up = x.chunk(2, dim=-1)
        return (functional.silu(gate) * up,)

    return Problem(
        run,
        reset=lambda: _poison(out),
        error=lambda results: relative_error(results[0][rows], expected),
        tolerance=TOLERANCES[setting.dtype],
        peers={"torch": lambda: by_torch},
    )


def make_skinny_gemm(sizes: Sizes, setting: Setting) -> Problem:
    """A linear layer of a decode step; on the path "gated" its columns are gate and up, and silu_and_mul follows."""
    x, weight = _normals(setting, (sizes["T"], sizes["K"]), (sizes["N"], sizes["K"]))
    weight *= sizes["K"] ** -0.5
    gated = setting.path == "gated"
    columns = sizes["N"] // 2 if gated else sizes["N"]
    out = torch.empty(sizes["T"], columns, dtype=setting.dtype, device=setting.device)
    sampled = sample(columns, SAMPLED_COLUMNS, setting)
    rows = torch.cat((sampled, sampled + columns)) if gated else sampled
    expected = reference.skinny_gemm(x, weight[rows], gated=gated)

    def run() -> Results:
        kernels.skinny_gemm(x, weight, gated=gated, out=out, overlap=True)  # as a model's layers
        return (out,)

    def by_torch() -> Results:
        product = functional.linear(x, weight)
        return (kernels.silu_and_mul(product) if gated else product,)

    return Problem(
        run,
        reset=lambda: _poison(out),
        error=lambda results: relative_error(results[0][:, sampled], expected),
        tolerance=TOLERANCES[setting.dtype],
        peers={"torch": lambda: by_torch},
    )


def make_rotary_embedding(sizes: Sizes, setting: Setting) -> Problem:
    """Whole heads, at random positions; queries and keys change at every run."""
    tokens, head_size, max_position = sizes["T"], sizes["D"], 8192
    query, key = _normals(setting, (tokens, sizes["Hq"], head_size), (tokens, sizes["Hkv"], head_size))
    before, rows = (query.clone(), key.clone()), sample(tokens, SAMPLED_ROWS, setting)
    positions = torch.randint(max_position, (tokens,), device=setting.device, generator=setting.generator())
    frequencies = 10_000.0 ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.arange(max_position, dtype=torch.float64)[:, None] * frequencies
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(setting.device)
    expected = query[rows], key[rows]
    reference.rotary_embedding(positions[rows], expected[0], expected[1], cos_sin)

    def run() -> Results:
        kernels.rotary_embedding(positions, query, key, cos_sin)
        return query, key

    def by_torch() -> Results:
        cosines, sines = cos_sin[positions][:, None].chunk(2, dim=-1)
        rotated = []
        for heads in (query, key):
            a, b = heads.chunk(2, dim=-1)
            rotated.append(torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1).to(heads.dtype))
        return tuple(rotated)

    def reset() -> None:
        query.copy_(before[0])
        key.copy_(before[1])

    return Problem(
        run,
        reset,
        error=lambda results: max(
            relative_error(result[rows], wanted) for result, wanted in zip(results, expected, strict=True)
        ),
        tolerance=TOLERANCES[setting.dtype],
        peers={"torch": lambda: by_torch},
    )


def make_reshape_and_cache(sizes: Sizes, setting: Setting) -> Problem:
    """Every token into a slot of its own, in random order, in a cache of some twice as many slots."""
    tokens, block_size = sizes["T"], sizes["block"]
    shape = (tokens, sizes["Hkv"], sizes["D"])
    key, value = _normals(setting, shape, shape)
    cache_shape = (-(-2 * tokens // block_size), sizes["Hkv"], block_size, sizes["D"])
    key_cache = torch.empty(cache_shape, dtype=setting.dtype, device=setting.device)
    value_cache = torch.empty_like(key_cache)
    order = torch.randperm(cache_shape[0] * block_size, device=setting.device, generator=setting.generator())
    slots, rows = order[:tokens].contiguous(), sample(tokens, SAMPLED_ROWS, setting)
    some_keys, some_values = key[rows].cpu(), value[rows].cpu()
    keys, values = torch.empty_like(some_keys)[:, :, None], torch.empty_like(some_values)[:, :, None]  # blocks of one
    reference.reshape_and_cache(some_keys, some_values, keys, values, torch.arange(len(rows)))
    block, offset = slots // block_size, slots % block_size

    def run() -> Results:
        kernels.reshape_and_cache(key, value, key_cache, value_cache, slots)
        return key_cache, value_cache

    def by_torch() -> Results:
        key_cache[block, :, offset] = key
        value_cache[block, :, offset] = value
        return key_cache, value_cache

    def error(results: Results) -> float:
        return max(
            relative_error(cache[block[rows], :, offset[rows]].cpu(), wanted[:, :, 0])
            for cache, wanted in zip(results, (keys, values), strict=True)
        )

    return Problem(
        run,
        reset=lambda: _poison(key_cache, value_cache),
        error=error,
        tolerance=0.0,
        peers={"torch": lambda: by_torch},
    )


def make_gather_cache(sizes: Sizes, setting: Setting) -> Problem:
    """B requests of L tokens each out of blocks in random order."""
    batch, length, block_size = sizes["B"], sizes["L"], sizes["block"]
    per_request = -(-length // block_size)
    shape = (batch * per_request, sizes["Hkv"], block_size, sizes["D"])
    key_cache, value_cache = _normals(setting, shape, shape)
    order = torch.randperm(shape[0], dtype=torch.int32, device=setting.device, generator=setting.generator())
    tables = order.view(batch, per_request)
    start_loc = torch.arange(batch + 1, dtype=torch.int32, device=setting.device) * length
    key = torch.empty(batch * length, sizes["Hkv"], sizes["D"], dtype=setting.dtype, device=setting.device)
    value, rows = torch.empty_like(key), sample(batch * length, SAMPLED_ROWS, setting)
    blocks, offsets = tables[rows // length, rows % length // block_size].long(), rows % length % block_size
    expected = key_cache[blocks, :, offsets], value_cache[blocks, :, offsets]

    def run() -> Results:
        kernels.gather_cache(key_cache, value_cache, tables, start_loc, key, value)
        return key, value

    def by_torch() -> Results:
        gathered = (cache[tables.long()].transpose(2, 3) for cache in (key_cache, value_cache))
        return tuple(whole.flatten(1, 2)[:, :length].flatten(0, 1) for whole in gathered)

    return Problem(
        run,
        reset=lambda: _poison(key, value),
        error=lambda results: max(
            relative_error(result[rows], wanted) for result, wanted in zip(results, expected, strict=True)
        ),
        tolerance=0.0,
        peers={"torch": lambda: by_torch},
    )


def make_copy_blocks(sizes: Sizes, setting: Setting) -> Problem:
    """Half of a cache's blocks onto the other half, in random order."""
    pairs_count = sizes["P"]
    (cache,) = _normals(setting, _cache_shape(sizes, 2 * pairs_count))
    order = torch.randperm(2 * pairs_count, device=setting.device, generator=setting.generator())
    sources, destinations = order[:pairs_count].contiguous(), order[pairs_count:].contiguous()
    pairs = torch.stack((sources, destinations), dim=1)

    def run() -> Results:
        kernels.copy_blocks(cache, pairs)
        return (cache,)

    def by_torch() -> Results:
        cache[:, :, destinations] = cache[:, :, sources]
        return (cache,)

    return Problem(
        run,
        reset=lambda: _fill_blocks(cache, destinations),
        error=_moved_blocks(cache, pairs, setting),
        tolerance=0.0,
        peers={"torch": lambda: by_torch},
    )


def make_swap_blocks(sizes: Sizes, setting: Setting) -> Problem:
    """All blocks of one cache to random places of another, from the GPU to pinned host memory or back.

    On the CPU both are ordinary memory.
    """
    shape, on_gpu = _cache_shape(sizes, sizes["P"]), setting.device.type == "cuda"
    (at_device,) = _normals(setting, shape)
    at_host = torch.zeros(shape, dtype=setting.dtype, pin_memory=on_gpu)
    inward = setting.path == "in"
    if inward:
        at_host.copy_(at_device)
    source, destination = (at_host, at_device) if inward else (at_device, at_host)
    order = torch.randperm(sizes["P"], device=setting.device, generator=setting.generator()).cpu()
    pairs = torch.stack((torch.arange(sizes["P"]), order), dim=1)
    places = order.to(destination.device)

    def run() -> Results:
        kernels.swap_blocks(source, destination, pairs)
        return (destination,)

    def by_torch() -> Results:
        destination[:, :, places] = source.to(destination.device)
        return (destination,)

    return Problem(
        run,
        reset=lambda: _poison(destination),
        error=_moved_blocks(source, pairs, setting),
        tolerance=0.0,
        peers={"torch": lambda: by_torch},
        capturable=False,
    )


def make_sample(sizes: Sizes, setting: Setting) -> Problem:
    """Rows with a few likely tokens over a normal background, as models give them; the path says which options are on.

    "all" adds penalties over 500 seen tokens, two biases, a mask that allows everything, and 5 log-probabilities.
    """
    rows, vocab_size = sizes["S"], sizes["V"]
    device, path = setting.device, setting.path
    logits = torch.randn(rows, vocab_size, device=device, generator=setting.generator()) * 2
    likely = torch.randint(vocab_size, (rows, 40), device=device, generator=setting.generator())
    logits.scatter_add_(1, likely, torch.full((rows, 40), 9.0, device=device))
    logits = logits.to(setting.dtype)

    def full(value: float, dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
        return torch.full((rows, *shape), value, dtype=dtype, device=device)

    arguments = {
        "temperature": full(0.0 if path == "greedy" else 0.8),
        "seeds": torch.arange(rows, device=device),
        "positions": torch.arange(rows, device=device),
    }
    if path in ("top_k", "top_k_top_p", "all"):
        arguments["top_k"] = full(50, torch.int32)
    if path in ("top_k_top_p", "top_p", "all"):
        arguments["top_p"] = full(0.9)
    if path == "min_p":
        arguments["min_p"] = full(0.05)
    if path == "all":
        seen = torch.arange(500, dtype=torch.int32, device=device).expand(rows, -1).contiguous()
        arguments |= {
            "min_p": full(0.01), "repetition_penalty": full(1.1), "presence_penalty": full(0.1),
            "frequency_penalty": full(0.1), "seen_tokens": seen, "seen_counts": torch.ones_like(seen),
            "seen_lengths": full(500, torch.int32), "slots": torch.arange(rows, dtype=torch.int32, device=device),
            "bias_tokens": seen[:, :2].contiguous(), "bias_values": full(1.0, torch.float32, 2),
            "allowed_tokens": full(-1, torch.int32, -(-vocab_size // 32)),
        }  # fmt: skip
    num_logprobs = 5 if path == "all" else None
    out = kernels.Sampled(full(-9, torch.int64))
    if num_logprobs is not None:
        top = full(-9, torch.int64, num_logprobs), full(0.0, torch.float32, num_logprobs)
        out = kernels.Sampled(out.token_ids, full(0.0), full(0, torch.int64), *top)
    size = kernels.sample_workspace(logits)
    workspace = torch.empty(size, device=device) if size else None
    some = sample(rows, SAMPLED_QUERIES, setting)
    of_rows = {name: tensor[some] for name, tensor in arguments.items()}
    if "slots" in of_rows:
        of_rows["slots"] = torch.arange(len(some), dtype=torch.int32, device=device)
    expected = reference.sampling_distribution(
        logits[some], of_rows.pop("temperature"),
        **{name: tensor for name, tensor in of_rows.items() if name not in ("seeds", "positions")},
    )  # fmt: skip
    us = torch.from_numpy(uniform(arguments["seeds"][some].tolist(), arguments["positions"][some].tolist()))

    def run() -> Results:
        kernels.sample(logits, **arguments, num_logprobs=num_logprobs, out=out, workspace=workspace)  # type: ignore[arg-type]
        return (out.token_ids,)

    def error(results: Results) -> float:
        """How far u is from what the drawn token covers of the running sum; a peer draws by numbers of its own."""
        token = results[0][some].cpu()[:, None]
        if bool((token < 0).any()):
            return float("inf")
        share = expected.gather(1, token)[:, 0]
        if results[0] is not out.token_ids:
            return float((share == 0).sum())
        until = expected.cumsum(1).gather(1, token)[:, 0]
        return float(torch.maximum(until - share - us, us - until).clamp_min(0).max())

    def by_torch() -> Results:
        x = logits.float()
        if path == "greedy":
            return (x.argmax(-1),)
        if path == "top_k":
            likeliest, ids = torch.topk(x / 0.8, min(50, vocab_size))
            return (ids.gather(1, torch.multinomial(torch.softmax(likeliest, dim=-1), 1))[:, 0],)
        if path in ("top_k_top_p", "top_p"):
            ordered, ids = torch.sort(x / 0.8, descending=True)
            if path != "top_p":
                ordered[:, 50:] = -torch.inf
            weights = torch.softmax(ordered, dim=-1)
            weights[weights.cumsum(-1) - weights > 0.9] = 0
            return (ids.gather(1, torch.multinomial(weights, 1))[:, 0],)
        weights = torch.softmax(x / 0.8, dim=-1)
        if path == "min_p":
            weights[weights < 0.05 * weights.amax(-1, keepdim=True)] = 0
        return (torch.multinomial(weights, 1)[:, 0],)

    return Problem(
        run,
        reset=lambda: _fill(out.token_ids, -9),
        error=error,
        tolerance=1e-4,
        peers={} if path == "all" else {"torch": lambda: by_torch},  # "all" has no short expression in torch
    )


def _fill(tensor: torch.Tensor, value: int) -> None:
    tensor.fill_(value)


def _moved_blocks(source: torch.Tensor, pairs: torch.Tensor, setting: Setting) -> Callable[[Results], float]:
    """The error of a destination whose blocks should be those of `source`, some pairs compared."""
    some = pairs[sample(len(pairs), SAMPLED_ROWS, setting).to(pairs.device)].cpu()
    layers, sides, _, *block = source.shape
    expected = torch.empty(layers, sides, len(some), *block, dtype=source.dtype)
    numbered = torch.stack((some[:, 0], torch.arange(len(some))), dim=1)
    reference.swap_blocks(source, expected, numbered)

    def error(results: Results) -> float:
        (destination,) = results
        return relative_error(destination[:, :, some[:, 1].to(destination.device)].cpu(), expected)

    return error


def _fill_blocks(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    cache[:, :, blocks] = float("nan")


def _cache_shape(sizes: Sizes, num_blocks: int) -> tuple[int, ...]:
    return sizes["layers"], 2, num_blocks, sizes["Hkv"], sizes["block"], sizes["D"]


def _normals(setting: Setting, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    random = setting.generator()
    return [torch.randn(shape, dtype=setting.dtype, device=setting.device, generator=random) for shape in shapes]

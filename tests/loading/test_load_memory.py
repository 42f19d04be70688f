"""Loading holds the weights and one file of the checkpoint, never a second copy, whatever the dtypes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from research_engine.loading.dummy import DummyCheckpoint
from research_engine.models.config import ModelConfig

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64,
}  # fmt: skip
MEASURE = """
import sys
import torch
from research_engine.loading import load_model, resolve_model
import research_engine.loading.safetensors, research_engine.loading.torch_bin

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

for case in ["dummy:tiny:bfloat16", *sys.argv[1:]]:  # the first for what is imported on the way
    name, _, dtype = case.rpartition(":")
    source = resolve_model(name)
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark begins here
    before = status("VmRSS")
    model = load_model(source, dtype=getattr(torch, dtype), device="cpu", progress=False)
    print(status("VmHWM") - before)
    del model
"""


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_hf(CONFIG)


def write(directory: Path, config: ModelConfig, kind: str) -> int:
    """A bfloat16 checkpoint in four files; returns the largest one's size."""
    directory.mkdir()
    shapes = DummyCheckpoint("weights", config, 0).shapes()
    suffix = {"safetensors": "model-{}.safetensors", "bin": "pytorch_model-{}.bin"}[kind]
    placed = {name: suffix.format(i * 4 // len(shapes)) for i, name in enumerate(shapes)}
    for file in set(placed.values()):
        tensors = {n: torch.full(shapes[n], 0.01, dtype=torch.bfloat16) for n in shapes if placed[n] == file}
        if kind == "safetensors":
            save_file(tensors, directory / file)
        else:
            torch.save(tensors, directory / file)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    index = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}[kind]
    (directory / index).write_text(json.dumps({"weight_map": placed}))
    return max((directory / file).stat().st_size for file in set(placed.values()))


def test_the_peak_is_the_weights_and_one_file(config: ModelConfig, tmp_path: Path) -> None:
    cases = [("safetensors", "bfloat16"), ("safetensors", "float32"), ("bin", "bfloat16")]
    largest = {kind: write(tmp_path / kind, config, kind) for kind in ("safetensors", "bin")}
    peaks = []
    for kind, dtype in cases:  # each in a process of its own: memory that a heap keeps would count for the next one
        command = [sys.executable, "-c", MEASURE, f"{tmp_path / kind}:{dtype}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
        if "clear_refs" in done.stderr:
            pytest.skip("the kernel does not let this process reset its high-water mark")
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]))
    for (kind, dtype), peak in zip(cases, peaks, strict=True):
        size = getattr(torch, dtype).itemsize
        weights, matrix = config.num_parameters * size, 8192 * 1024 * size  # matrices are laid out anew one at a time
        slack = 32 << 20  # allocator, code pages that are touched for the first time
        assert 0.75 * weights < peak < weights + max(largest[kind], matrix) + slack, (kind, dtype)

"""Arguments of compiled kernels, and where code may run; launches themselves where there is a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from research_engine.kernels import jit
from research_engine.kernels.jit.launching import _runs_on, pack

ADD = """
__global__ void add(const float* x, float* y, float factor, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] += factor * x[i];
}
"""


def test_arguments_have_the_size_that_a_kernel_reads() -> None:
    cpu, x = torch.device("cpu"), torch.zeros(3)
    packed = [pack(argument, cpu) for argument in (x, True, 7, 0.5, np.float64(2), np.int16(3))]
    assert [value.itemsize for value in packed] == [8, 1, 8, 4, 8, 2]
    assert int(packed[0]) == x.data_ptr()
    assert pack(7, cpu).tobytes()[:4] == np.int32(7).tobytes()  # so a kernel may declare it as int


def test_a_tensor_elsewhere_and_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="a tensor on cpu for a kernel on cuda:0"):
        pack(torch.zeros(1), torch.device("cuda", 0))
    with pytest.raises(TypeError, match="type str"):
        pack("x", torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arch", "native", "runs"),
    [
        ("sm_90a", "sm_90a", True),
        ("sm_90", "sm_90a", True),
        ("sm_80", "sm_86", True),
        ("sm_86", "sm_80", False),
        ("sm_80", "sm_90a", False),
        ("sm_90a", "sm_100a", False),
    ],
)
def test_code_runs_where_it_was_made_for(arch: str, native: str, runs: bool) -> None:
    assert _runs_on(arch, native) is runs


def test_without_a_gpu_the_architecture_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="name one, such as sm_90a"):
        jit.native_arch()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_kernel_runs_on_the_current_stream_and_in_a_graph(device: str) -> None:
    pytest.importorskip("cupy")
    add = jit.load(jit.compile(ADD, "add", arch=jit.native_arch()))
    x, y = torch.full((1000,), 3.0, device=device), torch.zeros(1000, device=device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        add(8, 128, x, y, 0.5, 999)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add((8,), (128, 1), x, y, 0.5, 999)
    graph.replay()
    assert y.tolist() == [3.0] * 999 + [0.0]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_too_much_shared_memory_is_refused(device: str) -> None:
    pytest.importorskip("cupy")
    add = jit.load(jit.compile(ADD, "add", arch=jit.native_arch()))
    x = torch.zeros(1, device=device)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        add(1, 1, x, x, 1.0, 1, shared_bytes=2**20)

"""Fixtures that every test may use: the devices that ops are tested on."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def cuda_reason() -> str | None:
    """Why CUDA tests cannot run here, or None if they can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    from research_engine.kernels import build_info

    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if not build_info()["built_with_cuda"]:
        return "the kernels were built without CUDA"
    return None


def pytest_report_header() -> str:
    reason = cuda_reason()
    return "CUDA tests: run" if reason is None else f"CUDA tests: skipped, {reason}"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Each device in turn; a test that takes it runs once on each, and is skipped where there is none."""
    if request.param == "cuda" and (reason := cuda_reason()):
        pytest.skip(reason)
    return request.param

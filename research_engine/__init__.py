"""A research framework for LLM inference: `LLM`, its parameters and `kernels`, each imported when first used.

Lazy, so that the engine's core, the schedulers and the simulator run without torch being imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from research_engine import kernels
    from research_engine.engine.sampling_params import SamplingParams
    from research_engine.engine.structured import StructuredOutputsParams
    from research_engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "kernels", "__version__"]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "kernels":
        return importlib.import_module("research_engine.kernels")
    if name == "LLM":
        return importlib.import_module("research_engine.llm").LLM
    if name == "SamplingParams":
        return importlib.import_module("research_engine.engine.sampling_params").SamplingParams
    if name == "StructuredOutputsParams":
        return importlib.import_module("research_engine.engine.structured").StructuredOutputsParams
    raise AttributeError(f"module 'research_engine' has no attribute {name!r}; it exports {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)

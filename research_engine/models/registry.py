"""From the architecture a checkpoint names to the class that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from research_engine.models.config import ConfigError

if TYPE_CHECKING:
    from research_engine.models.llama import LlamaForCausalLM

ARCHITECTURES = ("LlamaForCausalLM",)


def model_class(architecture: str) -> type[LlamaForCausalLM]:
    """The class for an architecture's name as config.json spells it.

    Raises:
        ConfigError: the architecture is not supported; the message lists those that are.
    """
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    from research_engine.models.llama import LlamaForCausalLM  # imports torch: only when a model is built

    return LlamaForCausalLM

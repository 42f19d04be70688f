"""Random runs as the engine's tests name them; they ship with the package, for policies' own tests."""

from research_engine.testing.random_runs import RandomRun

__all__ = ["RandomRun"]

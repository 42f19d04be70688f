"""The error of everything that describes a model."""

from __future__ import annotations


class ConfigError(ValueError):
    """A model configuration breaks a rule; the message names the key, its value and the rule."""

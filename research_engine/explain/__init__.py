"""The life of one request of a run: what happened to it, in words and as a picture."""

from .life import Life, life_of
from .words import tell

__all__ = ["Life", "life_of", "tell"]

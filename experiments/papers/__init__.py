"""Reproductions of published tables and figures (docs/reproductions.md)."""

"""Policies, one file each. `create("fcfs")` makes one; base.py says how to write one."""

from .registry import available, create

__all__ = ["available", "create"]

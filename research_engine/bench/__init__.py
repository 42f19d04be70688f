"""Measurements of the engine on the machine at hand, each beside what it is compared with in the same run."""

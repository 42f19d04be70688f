"""Measures what the simulator's profiles hold, on the machine at hand, with the engine that they stand in for."""

"""How far the simulator is from the real engine: the same arrivals on both, compared."""

"""How much load a simulated system takes within its limits on latency, and how many GPUs a load needs."""

"""What computes batches: real devices through torch, and simulated ones. Each implements `engine.contract.Executor`."""

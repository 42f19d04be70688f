"""The core: requests, the paged KV cache, the loop and its contract. Pure Python; imports nothing of the project."""

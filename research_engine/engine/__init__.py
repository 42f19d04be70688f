"""The core: requests, the paged KV cache, the loop and its contract. Pure Python; nothing of the project is imported here."""

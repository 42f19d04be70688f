"""Serves a model over HTTP with OpenAI's protocol: the engine in one process, HTTP in another."""

"""Controlled experiments: a YAML file in, trials on the engine, tables and plots out."""

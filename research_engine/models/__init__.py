"""Model definitions: one shared transformer, its configuration, and the registry that names what is supported."""

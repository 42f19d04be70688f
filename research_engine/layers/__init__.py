"""Building blocks of the models: linear layers, embeddings, rotary tables."""

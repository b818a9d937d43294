"""Model families: the dimensions of each layer of a model, from its `config.json`."""

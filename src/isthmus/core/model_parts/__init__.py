"""Keys of a model's `config.json` that differ between families."""

"""A stage's part of a transformers model: built, loaded, computed, recomputed, exported."""

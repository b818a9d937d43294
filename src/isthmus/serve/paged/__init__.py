"""The engine of this project: a transformers model computed in tiles of rows, over a paged key-value cache."""

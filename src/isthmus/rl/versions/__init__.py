"""Versions of weights: their names, pieces and chunks, those that are kept, and one that arrives."""

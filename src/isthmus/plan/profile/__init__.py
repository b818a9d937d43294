"""Profiles of models by layer (parameters, operations, bytes, saved tensors), and scores of chips."""

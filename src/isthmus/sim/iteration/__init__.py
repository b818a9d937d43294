"""Iterations of a whole run: replicas, shared links and the all-reduce of gradients."""

"""Reduce gradients over all owners of a parameter, then update the weights."""

"""From gradients to new weights: summed among all owners of a parameter, then the optimizer."""

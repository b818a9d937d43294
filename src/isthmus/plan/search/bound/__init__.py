"""The proven lower bound on the iteration time of every plan in the search space."""

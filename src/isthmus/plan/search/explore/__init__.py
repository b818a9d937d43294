"""The branch-and-bound search."""

"""The coordinator: the only package that changes the pool state."""

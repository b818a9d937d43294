"""The coordinator: the only package that changes the state of the pool."""

"""Read-only queries on the state of the pool."""

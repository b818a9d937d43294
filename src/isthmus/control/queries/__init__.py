"""Read-only queries on the pool state."""

"""The state of the pool as records and indexes, its events, and its invariants."""

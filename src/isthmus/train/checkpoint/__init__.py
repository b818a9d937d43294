"""How a run's state is kept: in shared memory, at a peer, on disk; and found again."""

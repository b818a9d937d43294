"""Save and restore training state: in shared memory, on a peer, on disk."""

"""The decision centre as a process: its network port, its durable log, and its clients."""

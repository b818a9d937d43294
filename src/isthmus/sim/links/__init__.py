"""Links on the event kernel: rate, delay, jitter and queueing."""

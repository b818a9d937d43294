"""The processes of a rank: the supervisor, and the worker with its training loop."""

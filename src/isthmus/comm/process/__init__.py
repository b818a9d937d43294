"""A transport in a separate process, connected to the worker by shared memory."""

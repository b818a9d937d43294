"""The transport in a process of its own, reached through shared memory."""

"""The agent process: observes workers, syncs with the server, executes instructions."""

"""The agent's process: observes workers, syncs with the server, carries out instructions."""

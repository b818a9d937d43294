"""The command on synchronisation strategies."""

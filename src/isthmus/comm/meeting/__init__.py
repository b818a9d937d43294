"""The tree of ranks over which a run meets, ends and reports losses, as pure data and decisions."""

"""Recovery from a lost rank: rejoin the group, restore a snapshot from memory, continue."""

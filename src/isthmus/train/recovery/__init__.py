"""Recovery after a lost rank: rejoin, restore from memory, go on."""

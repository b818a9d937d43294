"""Wide-area links: dialling across them, and emulating them on one machine, with or without root."""

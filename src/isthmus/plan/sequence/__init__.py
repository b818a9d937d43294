"""Long sequences: blocks dealt to cores, ranks dealt to sequences."""

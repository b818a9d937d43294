"""Parts at a site whose own scheduler holds the cards."""

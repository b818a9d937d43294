"""Which devices of a site are free, held or claimed, and which ones a claim takes."""

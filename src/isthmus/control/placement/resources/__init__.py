"""What a job needs of a place, and what is free."""

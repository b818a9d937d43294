"""Scripts of the repository: set-up and documentation."""

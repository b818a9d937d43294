"""Parts of a job file: its runtime at the sites, and a program of the user's own."""

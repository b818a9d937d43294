"""Search: from a job and a pool to simulated candidate plans with reasons."""

"""From a job and a pool to candidate plans, with reasons."""

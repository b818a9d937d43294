"""The processes of a rank: supervisor, worker, and the training run in it."""

"""`isthmus demo`: a pool on this machine, and a job trained on it."""

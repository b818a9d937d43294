"""`isthmus demo`: a local pool and a training job on it."""

"""Decode engines of others: servers for inference behind the seam of this project."""

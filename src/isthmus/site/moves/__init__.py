"""Moves of running parts to other devices of the site, so that a waiting part has a place."""

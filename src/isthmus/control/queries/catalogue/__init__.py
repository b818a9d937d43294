"""Reads of the catalogue: which versions a job needs, and what bringing them to a site costs."""

"""Placement inside a site: which nodes and cards of a site a part gets, and which moves make room for it."""

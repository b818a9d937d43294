"""Reads of the membership of sites: what a site has in the pool."""

"""Allocation of a site's devices: free, held and claimed ones."""

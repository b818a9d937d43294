"""Vendors' communication libraries behind one seam, one file per vendor; for the ranks of one cluster."""

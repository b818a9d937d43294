"""Sums and copies of a group over clusters: the vendor's library inside each cluster, messages between clusters."""

"""Sums and copies of a group that spans clusters: the vendor's library inside each cluster, messages between clusters."""

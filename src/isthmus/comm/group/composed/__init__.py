"""Sums, copies and messages of a group: the vendor's library inside each cluster, messages between clusters."""

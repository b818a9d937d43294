"""Chains of pipeline stages over node groups: which there are, and in which order to try them."""

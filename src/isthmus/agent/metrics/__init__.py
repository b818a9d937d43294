"""Metrics of a site's agent, for the owner's Prometheus."""

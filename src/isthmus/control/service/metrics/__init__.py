"""Metrics of the server in the text format of Prometheus."""

"""Simulated iterations of all replicas: pipelines, shared links and gradient all-reduce."""

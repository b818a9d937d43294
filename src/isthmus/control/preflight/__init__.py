"""Preflight of a job at the sites of its plan: which checks, and the state of their answers. Pure."""

"""Traces of jobs: read, generated, and turned into submissions."""

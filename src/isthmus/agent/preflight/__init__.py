"""Checks of jobs that wait: what this site has and reaches."""

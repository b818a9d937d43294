"""Moves of running jobs to other devices of their sites, which make room for the head of the queue."""

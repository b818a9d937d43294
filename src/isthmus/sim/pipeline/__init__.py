"""Simulation of one pipeline schedule."""

"""Simulation results as an HTML page or a Chrome trace."""

"""Fault injection for the pool simulator."""

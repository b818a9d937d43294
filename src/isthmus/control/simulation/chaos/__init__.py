"""Seeded runs with every fault at once, and what must hold in them."""

"""Seeded chaos runs with all kinds of faults, and the invariants that they check."""

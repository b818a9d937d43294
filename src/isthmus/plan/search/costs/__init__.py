"""Costs of a stage at a node group: seconds, bytes, and routes between clusters."""

"""Rollouts: what runs around the ledger: its log, the trajectories, rewards and engines."""

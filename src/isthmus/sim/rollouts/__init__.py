"""Rollouts of reinforcement learning on a virtual clock: decoding, trajectories up, training, weights down."""

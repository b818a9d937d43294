"""The commands on reinforcement learning."""

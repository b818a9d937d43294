"""Rollouts of reinforcement learning: who decodes, how many sequences at once, and what a step then takes."""

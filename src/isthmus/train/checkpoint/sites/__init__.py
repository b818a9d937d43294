"""Checkpoints of sites that share no disk: parts stay at their site, with copies at others; one manifest for all."""

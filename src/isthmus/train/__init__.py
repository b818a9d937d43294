"""The training runtime: pipeline stages of a model, their weights, optimizer, checkpoints and recovery."""

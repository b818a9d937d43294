"""Trained samples with their tokens, kept in files for audits after a run."""

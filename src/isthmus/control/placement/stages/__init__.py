"""The stages of placement: compute, network and storage, and why they refuse."""

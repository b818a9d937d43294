"""Calibration: fits the parameters of the time model to measured runs and micro-benchmarks."""

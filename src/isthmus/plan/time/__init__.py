"""The time model of plans: rooflines, collectives, calibration, and prediction by simulation."""

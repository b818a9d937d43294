"""What a plan takes: rooflines, collectives, calibration, and the prediction by simulation."""

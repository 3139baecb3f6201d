"""Calibration: from a declared recall to the effort that keeps it."""

"""Calibration: from a declared precision to settings of a decoder."""

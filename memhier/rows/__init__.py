"""Rows of one width in segments, and their ranking by distance."""

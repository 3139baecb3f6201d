"""Placement: the place of each sample in memory or storage."""

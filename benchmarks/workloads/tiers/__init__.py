"""Workloads of the tiers alone."""

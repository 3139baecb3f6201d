"""Workloads of embedding tables."""

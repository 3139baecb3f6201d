"""Workloads of replay."""

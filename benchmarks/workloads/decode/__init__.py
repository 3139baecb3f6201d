"""Workloads of the decoder."""

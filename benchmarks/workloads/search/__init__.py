"""Workloads of vector search."""

"""Workloads of indexes of items with many vectors."""

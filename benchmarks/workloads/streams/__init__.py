"""Workloads of indexes that change all the time."""

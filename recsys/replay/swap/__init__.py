"""Swaps between memory and storage."""

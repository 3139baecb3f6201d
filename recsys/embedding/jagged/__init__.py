"""Rows of sequences from many tables."""

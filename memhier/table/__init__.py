"""Tiered tables: a cache of rows over a log."""

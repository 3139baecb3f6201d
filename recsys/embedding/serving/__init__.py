"""Trained tables, read by processes that do not train them."""

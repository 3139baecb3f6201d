"""Codes of tokens, scores from them, and the effort of a search."""

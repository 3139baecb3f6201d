"""Attributes of vectors and the conditions of ``where``."""

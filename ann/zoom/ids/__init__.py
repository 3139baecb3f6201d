"""Ids of vectors: integers and texts."""

"""Routing to lists: which of them are nearest to a query."""

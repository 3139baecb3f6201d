"""The store: transactions over a catalog and append-only segments."""

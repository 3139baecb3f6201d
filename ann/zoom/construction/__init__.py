"""Construction of an index from a source of vectors."""

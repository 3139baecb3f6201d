"""The full vectors on SSD and the catalog of an index."""

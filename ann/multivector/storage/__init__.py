"""Parts, the catalog, the snapshot of an index, and its DRAM."""

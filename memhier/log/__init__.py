"""Logs of records and rows in a store, with an index in DRAM and compaction."""

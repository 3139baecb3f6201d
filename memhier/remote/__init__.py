"""Backups on any file system that fsspec knows: push, pull, and reading in place through a cache on SSD."""

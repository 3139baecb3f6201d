"""DRAM/SSD tiering primitives, and the systems built on them."""

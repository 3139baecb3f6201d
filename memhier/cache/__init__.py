"""Slots and slabs: the DRAM side of a cache."""

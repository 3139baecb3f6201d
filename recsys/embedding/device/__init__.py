"""Copies between DRAM and the accelerator that has the dense part of a model."""

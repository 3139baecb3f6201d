"""Bytes and pages: readers, kernels, page files, and the device below them."""

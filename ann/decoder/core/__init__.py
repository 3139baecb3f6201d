"""The decoder's kernels: compiled and in Python."""

"""Limits on faiss's OpenMP threads.

They do not survive a fork: the child of a process that has used them would wait for them for ever. To wake them for a
few queries takes longer than the queries.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import faiss

__all__ = ["one_thread"]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let faiss use only the calling thread, for its calls within the block."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: faiss.omp_set_num_threads(1))

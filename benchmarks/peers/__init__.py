"""The rivals of memhier: one short adapter for each peer, and the process that runs it."""

__all__ = ["PEERS"]

# Each name is a module of this package with a class `Peer`.
PEERS = (
    "memhier", "diskann", "lancedb", "zvec", "faiss_lists", "faiss_refine", "usearch", "hnswlib", "rabitqlib", "svs",
)  # fmt: skip

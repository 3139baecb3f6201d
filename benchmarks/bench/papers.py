"""Each paper's headline beside what was measured here, and how the scales differ."""

import numpy as np
from rich.table import Table

from memhier.benchmarks.bench.results import Row
from memhier.benchmarks.bench.summary import ratios, search_peers
from memhier.benchmarks.bench.tables import search_sizes

__all__ = ["papers_rows", "papers_table"]

_NOT_YET = "not yet"
_PAPERS = (
    ("Zoom (arXiv 1809.04067)", "an order of magnitude more efficient than the best of 2018, no less accurate",
     "the paper: billions of vectors against in-memory and compressed indexes of 2018; here: up to millions, against "
     "the disk indexes of today"),
    ("FGD (arXiv 1806.04189)", "an order of magnitude faster than full softmax at nearly the same accuracy",
     "the paper: vocabularies of language models and translators on one core"),
    ("Bagpipe (arXiv 2202.12429)", "up to 5.6 times over training without a cache",
     "the paper: clusters of GPUs and a remote table; here: one machine and a table on SSD"),
    ("CarM (arXiv 2110.07276)", "up to 28.4 points of accuracy at the same training time",
     "the paper: image streams on GPUs; here: small data sets on a CPU"),
)  # fmt: skip


def papers_rows(rows: list[Row]) -> list[tuple[str, str, str, str]]:
    """Return paper, headline, what was measured here, and the difference of scale."""
    return [
        (name, headline, _zoom(rows) if name.startswith("Zoom") else _NOT_YET, scale)
        for name, headline, scale in _PAPERS
    ]


def papers_table(rows: list[Row]) -> Table:
    """Return the same as a table."""
    table = Table("paper", "its headline", "measured here", "difference of scale", show_lines=True)
    for cells in papers_rows(rows):
        table.add_row(*cells)
    return table


def _zoom(rows: list[Row]) -> str:
    lines = []
    for workload, size in search_sizes(rows):
        peers = search_peers(rows, workload, size)
        for peer in peers:
            for metric, words in (("qps_core", "queries a CPU second"), ("pages", "fewer reads")):
                found = ratios(peers.get("memhier", []), peers[peer], 0.95, metric) if peer != "memhier" else []
                if found:
                    lines.append(f"{workload} ({size}): {float(np.median(found)):.1f} times {peer} in {words} at 0.95")
    return "\n".join(lines) or _NOT_YET

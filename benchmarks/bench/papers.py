"""Each paper's headline beside the figures measured here, and the difference of scale."""

from pathlib import Path

import numpy as np
from rich.table import Table

from memhier.benchmarks.bench.figures import Figure
from memhier.benchmarks.bench.results import Row
from memhier.benchmarks.bench.summary import at_recall, curve, ratios, script_records, search_peers
from memhier.benchmarks.bench.tables import number, search_sizes

__all__ = ["PAPER_TITLES", "SHIPPED_RESULTS", "measured_on", "papers_rows", "papers_table"]

PAPER_TITLES = ("paper", "its headline", "measured here", "difference of scale")
# Rows of one quiet run, so that a clone has figures to show before it has measured any.
SHIPPED_RESULTS = Path(__file__).with_name("papers.jsonl")
_NOT_YET = "not yet"
_TARGET = 0.95
_PAPERS = {
    "Zoom": (
        "Zoom (arXiv 1809.04067)",
        "an order of magnitude more efficient than the best of 2018, no less accurate; GRIP counts VQ, vectors held "
        "times queries a second",
        "the paper: its abstract gives no number of vectors; the DiskANN paper describes it with 10 million, against "
        "in-memory and compressed indexes of 2018; here: up to a million, against the indexes of today; VQ as vectors "
        "a KB of DRAM, all memory that a peer held counted, times queries a CPU second; peers named -dram read nothing "
        "and hold every vector or its code",
    ),
    "FGD": (
        "FGD (arXiv 1806.04189)",
        "an order of magnitude faster than full softmax at nearly the same accuracy",
        "the paper: vocabularies of up to 80,000 words of language models and translators, one core of 2018",
    ),
    "Bagpipe": (
        "Bagpipe (arXiv 2202.12429)",
        "up to 5.6 times (6.2 in its first version) faster than the state of the art of its day",
        "the paper: clusters of GPUs, embeddings on remote servers over a network, the whole Criteo set, against the "
        "training systems of 2022; here: one machine without a GPU, a table on SSD, a sample, against tables in "
        "memory, caches without lookahead, key-value stores and a mapped file",
    ),
    "CarM": (
        "CarM (arXiv 2110.07276)",
        "up to 28.4 points of accuracy at the same training time",
        "the paper: image streams up to ImageNet on GPUs with methods' own networks; here: small images and small "
        "networks on processors",
    ),
}


def measured_on(rows: list[Row]) -> str:
    """Return one line about the machine and the date of the newest measurement; empty when `rows` name no machine."""
    machines = [row for row in rows if row["kind"] == "machine"]
    if not machines:
        return ""
    last = machines[-1]
    versions = ", ".join(f"{name} {last[name]}" for name in ("memhier", "numpy", "faiss-cpu", "lmdb") if name in last)
    return (
        f"Measured {last.get('date', 'on an unknown date')} on {last.get('processor', 'an unknown processor')}, "
        f"{last.get('cores', '?')} cores, {last.get('memory', '?')} of memory; {versions}."
    )


def papers_rows(rows: list[Row]) -> list[tuple[str, str, str, str]]:
    """Return paper, headline, the figures measured here, and the difference of scale."""
    out = []
    for paper, (name, headline, scale) in _PAPERS.items():
        measured = _search_lines(rows) if paper == "Zoom" else []
        scales = [scale]
        for row, record in script_records(rows).values():
            told = [_words(figure) for figure in record.figures if figure.paper == paper]
            measured += [f"{row['workload']} ({row['size']}): {line}" for line in told]
            if told and record.scale:
                scales.append(f"{row['workload']} ({row['size']}): {record.scale}")
        out.append((name, headline, "\n".join(measured) or _NOT_YET, "\n".join(scales)))
    return out


def papers_table(rows: list[Row]) -> Table:
    """Return the same as a table."""
    table = Table(show_lines=True, caption=measured_on(rows) or None)
    for title in PAPER_TITLES:
        table.add_column(title, overflow="fold")
    for cells in papers_rows(rows):
        table.add_row(*cells)
    return table


def _words(figure: Figure) -> str:
    spread = f" ({number(figure.least)} to {number(figure.greatest)})" if figure.least < figure.greatest else ""
    return f"{figure.name}: {number(figure.value)} {figure.unit}{spread}"


def _search_lines(rows: list[Row]) -> list[str]:
    """Return a line for each workload with our own VQ, and one for each peer with ratios and its VQ."""
    lines = []
    for workload, size in search_sizes(rows):
        peers = search_peers(rows, workload, size)
        ours = peers.pop("memhier", [])
        vq = _vq(rows, ours, workload, size, "memhier") if ours else None
        told = []
        for peer, rounds in peers.items():
            words = [
                form.format(number(float(np.median(found))))
                for metric, form in (
                    ("qps_core", "{} times its queries a CPU second"),
                    ("pages", "its reads {} times ours"),
                )
                if (found := ratios(ours, rounds, _TARGET, metric))
            ]
            theirs = _vq(rows, rounds, workload, size, peer)
            if words:
                told.append(f"- {peer}: {', '.join(words)}" + ("" if theirs is None else f" (VQ {number(theirs)})"))
        if told:
            lines.append(f"{workload} ({size}), recall {_TARGET}" + ("" if vq is None else f", VQ {number(vq)}") + ":")
            lines += told
    return lines


def _vq(rows: list[Row], rounds: list[Row], workload: str, size: str, peer: str) -> float | None:
    """Return vectors that a KB of DRAM holds, counting all memory of the peer, times queries a second."""
    build = [
        row
        for row in rows
        if (row["kind"], row.get("workload"), row.get("size"), row.get("peer")) == ("build", workload, size, peer)
    ]
    found = []
    # A map holds more with read-ahead than without: queries are compared with the memory that they took.
    for ahead in {point["effort"].get("read_ahead") for row in rounds for point in row["rows"]}:
        some = [row | {"rows": [p for p in row["rows"] if p["effort"].get("read_ahead") == ahead]} for row in rounds]
        held = max(point["private_bytes"] + point["cached_bytes"] for row in some for point in row["rows"])
        at = at_recall(curve(some), _TARGET, "qps_core")
        if at is not None and build and held > 0:
            found.append(1024 * float(build[-1]["vectors"]) / held * at[0])
    return max(found, default=None)

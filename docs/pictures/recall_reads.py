"""Draw docs/pictures/recall_reads.svg from the measurements in benchmarks/bench/papers.jsonl."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
MEASURED = HERE.parents[1] / "benchmarks/bench/papers.jsonl"
NAMES = {"memhier": ("memhier", "#1f77b4"), "diskann": ("DiskANN", "#d62728")}


def curve(peer: str) -> list[tuple[float, float]]:
    """Return recall and reads of each effort, without points that a point of more recall and fewer reads beats."""
    rows = [row for line in MEASURED.read_text().splitlines() if (row := json.loads(line))["kind"] == "search"]
    first = next(row for row in rows if row["peer"] == peer)  # reads do not differ between rounds
    points = sorted((each["recall"], each["pages"]) for each in first["rows"])
    return [(recall, reads) for at, (recall, reads) in enumerate(points) if all(reads < p[1] for p in points[at + 1 :])]


def draw(path: Path) -> None:
    """Draw the curves of all peers."""
    plt.rcParams.update({"svg.hashsalt": "memhier", "svg.fonttype": "none", "font.size": 11})
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for peer, (label, color) in NAMES.items():
        points = [(recall, reads) for recall, reads in curve(peer) if 0.9 <= recall < 0.997]
        axes.plot(*zip(*points, strict=True), "o-", label=label, color=color)
    axes.set_xlabel("share of the true 10 nearest vectors that are found")
    axes.set_ylabel("SSD reads a query (4 KiB)")
    axes.set_title("How often a search goes to the SSD, with equal memory", loc="left")
    axes.set_ylim(0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(HERE / "recall_reads.svg")

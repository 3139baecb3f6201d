"""The report in a real browser, without a network: plots are drawn and nothing is complained about."""

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from memhier.benchmarks.bench.figures import Bar, Bars, Curves, Figure, Record, Series
from memhier.benchmarks.bench.report import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

POINT = {
    "recall": 0.93, "recall_id": 0.93, "cpu_ms": 1.0, "mean_ms": 1.0, "p50_ms": 1.0, "p99_ms": 2.0, "pages": 9.0,
    "private_bytes": 10, "cached_bytes": 0,
}  # fmt: skip
ROW = {
    "task": "w/quick/p/search/0", "kind": "search", "workload": "w", "size": "quick", "peer": "p", "round": 0,
    "held_bytes": 5, "settings": "",
    "rows": [POINT | {"effort": {"e": 1}}, POINT | {"effort": {"e": 2}, "recall": 0.97, "pages": 20.0}],
}  # fmt: skip
RECORD = Record(
    [Figure.of("f", [1, 2], "ms", "less")],
    [Curves("misses", "rows", "ratio", [Series("lru " * 40, [(1.0, 0.9), (1000.0, 0.1)])], log_x=True)],
    [Bars("accuracy", "%", [Bar.of("ünë " * 40, [3, 4]), Bar.of("two", 5)])],
)
SCRIPT = {
    "task": "s/quick", "kind": "script", "workload": "s", "size": "quick", "settings": "", "words": "said",
    "command": "python -m s", "wall_s": 1.0, "figures": json.loads(json.dumps(asdict(RECORD))),
}  # fmt: skip


@pytest.mark.skipif(BROWSER is None, reason="no chromium to open the report with")
def test_plots_are_drawn_without_a_network(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    # What the browser laid out goes into the page itself, for dumping: what is drawn, within its plot, and what is
    # written beyond it; and whatever the page asked for, had it or not.
    script = """<script>
    const within = e => {
        const [a, b] = [e, e.closest('svg')].map(each => each.getBoundingClientRect());
        const across = a.left >= b.left - 1 && a.right <= b.right + 1;
        return a.width > 0 && across && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
    };
    const all = of => [...document.querySelectorAll(of)];
    document.title = all('circle,svg rect:not([fill=none])').filter(within).length + ' drawn, '
        + all('svg text').filter(e => !within(e)).length + ' astray, '
        + performance.getEntriesByType('resource').length + ' asked for';
    </script>"""
    page.write_text(write_report([ROW, SCRIPT], "today").replace("</body>", f"{script}</body>"), encoding="utf-8")
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--proxy-server=127.0.0.1:9", "--enable-logging=stderr", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
    # Two efforts in each of four plots, two points of a curve, two bars.
    assert "<title>12 drawn, 0 astray, 0 asked for</title>" in done.stdout
    assert re.findall(r"CONSOLE.*", done.stderr) == []

"""``memhier demo`` from one end to the other, on a small installation and, once, on the real one."""

import builtins
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memhier.ann import ZoomIndex
from memhier.benchmarks.cli.demo import run as run_module
from memhier.benchmarks.cli.demo.measure import RECALLS, Truth, measure_costs, share_found
from memhier.benchmarks.cli.main import main

THINGS = [
    "date", "zip", "median", "socket", "thread", "colour", "matrix", "letter", "kernel", "river", "planet", "engine",
    "castle", "violin",
]  # fmt: skip
DEEDS = ["parse", "open", "compute", "close", "rotate", "convert", "merge", "sort", "print", "forget"]


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of 140 functions, every one about something else."""
    root = tmp_path / "lib"
    root.mkdir()
    for thing in THINGS:
        lines = []
        for number, deed in enumerate(DEEDS):
            lines.append(
                f"def {deed}_{thing}(text, strict={number}):\n"
                f"    '''Will {deed} the given {thing} for the caller.\n\n"
                f"    Raises an error when the {thing} is bad.'''\n"
                f"    return {deed}({thing}, text, {number})\n"
            )
        (root / f"{thing}s.py").write_text("\n".join(lines))
    monkeypatch.setattr(run_module, "installed_roots", lambda: [root])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["demo", *map(str, arguments)])


def test_the_demo_measures_what_it_says(installation: Path, tmp_path: Path) -> None:
    result = invoke("--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "cache" / "memhier-demo" / "current"
    for words in ("recall@10 declared", "recall@10 measured", "codes scanned per query",
                  "latency p50, ms", "latency p99, ms", "page reads per query",
                  "bytes a vector", "I/O engine", "140 x 256 float32", "Try next:", "memhier probe"):  # fmt: skip
        assert words in result.output
    assert (folder / "recall_reads.png").read_bytes().startswith(b"\x89PNG")

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["corpus"]["functions"] == 140
    assert (report["tuning"], report["queries"]) == (70, 70)
    assert report["found_exact"] > 0.9
    for costs in (report["as_built"], report["tuned"]):
        assert [cost["declared"] for cost in costs] == list(RECALLS)
    surest = report["tuned"][-1]
    assert surest["recall"] >= 0.98
    assert surest["found"] == pytest.approx(report["found_exact"], abs=0.05)
    assert report["as_built"][-1]["pages"] > 0
    assert set(report["seconds"]) >= {"Read the Python installation", "Build the index", "Search the index from SSD"}

    vectors = np.load(folder / "vectors.npy")
    assert vectors.shape == (140, 256)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    with ZoomIndex.open(folder / "index") as index:
        assert report["index"]["memory_bytes"] <= report["index"]["dram"] == index.stats()["dram"]
        assert index.search(vectors[5], 1).ids.tolist() == [5]


def test_a_query_builds_once_and_finds_the_obvious_function(installation: Path, tmp_path: Path) -> None:
    first = invoke("--query", "rotate the planet", "--json", tmp_path / "answers.json")
    assert first.exit_code == 0, first.output
    assert "building in" in first.output
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert len(answers) == 10
    best = answers[0]
    assert best["name"] == "planets.rotate_planet"
    line = (installation / "planets.py").read_text().splitlines()[best["line"] - 1]
    assert line.startswith("def rotate_planet")
    assert [answer["distance"] for answer in answers] == sorted(answer["distance"] for answer in answers)
    for words in (f"{installation / 'planets.py'}:{best['line']}", "def rotate_planet(text, strict=4)"):
        assert words in first.output
    assert f"{best['distance']:.3f}" in first.output

    second = invoke("--query", "forget a letter")
    assert "building" not in second.output
    assert "letters.forget_letter" in second.output

    (installation / "new.py").write_text("def teleport_llama(llama):\n    return llama\n")
    third = invoke("--query", "teleport my llama")
    assert "building in" in third.output
    assert "new.teleport_llama" in third.output


def test_options_that_ask_for_another_demo_build_it(installation: Path) -> None:
    assert invoke("--query", "date", "--limit", 30).exit_code == 0
    assert "building" not in invoke("--query", "date").output
    assert "building" not in invoke("--query", "date", "--limit", 30).output
    assert "building" in invoke("--query", "date", "--limit", 40).output
    assert "building" in invoke("--query", "date", "--limit", 40, "--seed", 1).output


def test_the_same_seed_gives_the_same_vectors(installation: Path, tmp_path: Path) -> None:
    vectors = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert invoke("--dir", tmp_path / name, "--query", "date", "--seed", seed).exit_code == 0
        vectors.append(np.load(tmp_path / name / "current" / "vectors.npy"))
    assert np.array_equal(vectors[0], vectors[1])
    assert not np.array_equal(vectors[0], vectors[2])


def test_without_matplotlib_the_demo_goes_on(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name, name=name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    result = invoke()
    assert result.exit_code == 0, result.output
    assert "pip install 'memhier[plots]'" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dram", "lots"], "--dram='lots': expected a size"),
        (["--dram", "1KiB"], "is needed"),
        (["--query", "?!"], "holds no word"),
        (["--limit", "3"], "Invalid value for '--limit'"),
        (["--json", "/nowhere/at/all.json"], "does not exist or cannot be written"),
        (["--dir", __file__], "this is a file"),
        (["--dir", str(Path(__file__).parent)], "holds files that are no demo's"),
    ],
)
def test_user_errors_come_in_plain_words(installation: Path, arguments: list[str], words: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code in (1, 2)
    assert words in result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_an_installation_without_functions_is_refused(installation: Path) -> None:
    for file in installation.iterdir():
        file.unlink()
    result = invoke()
    assert result.exit_code == 1
    assert "only 0 functions in 0 files" in result.output


def test_an_installation_without_docstrings_is_refused(installation: Path) -> None:
    for file in installation.iterdir():
        file.unlink()
    (installation / "plain.py").write_text("".join(f"def f{i}(): return {i}\n" for i in range(20)))
    result = invoke()
    assert result.exit_code == 1
    assert "only 0 of the 20 functions have a docstring" in result.output


def test_no_sentence_that_tunes_is_measured(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[bytes] = []
    asked: list[bytes] = []
    tune, search = ZoomIndex.tune, ZoomIndex.search

    def record_tune(self: ZoomIndex, queries: Any) -> None:
        tuned.extend(query.tobytes() for query in queries)
        tune(self, queries)

    def record_search(self: ZoomIndex, queries: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(queries.tobytes())
        return search(self, queries, *arguments, **options)

    monkeypatch.setattr(ZoomIndex, "tune", record_tune)
    monkeypatch.setattr(ZoomIndex, "search", record_search)
    result = invoke()
    assert result.exit_code == 0, result.output
    assert len(set(tuned)) == len(set(asked)) == 70
    assert not set(tuned) & set(asked)
    assert len(asked) == 70 * 2 * len(RECALLS)


def test_later_queries_profit_from_the_tuning(installation: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "memhier-demo" / "current"
    assert invoke("--query", "date").exit_code == 0
    with ZoomIndex.open(folder / "index") as index:
        before = index.stats()["calibrated_recall"], index.explain(np.ones(256)).to_dict()
    assert invoke().exit_code == 0
    with ZoomIndex.open(folder / "index") as index:
        assert (index.stats()["calibrated_recall"], index.explain(np.ones(256)).to_dict()) != before


def test_cost_counts_what_every_query_did(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((3000, 64), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = vectors[:20]
    distances = 1 - queries @ vectors.T
    ids = np.argsort(distances, axis=1)[:, :10]
    truth = Truth(np.arange(20), queries, ids, np.take_along_axis(distances, ids, 1))
    calls: list[int] = []
    with ZoomIndex.build(tmp_path / "index", vectors, metric="cosine", dram="4MiB") as index:
        before = index.stats()
        settings = [(index, 1.0), (index, 0.5), (index, 0.95)]
        all_, half, most = costs = measure_costs(settings, truth, lambda: calls.append(1))
        after = index.stats()
        scanned = [index.search(queries, 10, recall=cost.declared).stats["scanned"] / 20 for cost in costs]
    assert (all_.recall, all_.found, len(calls)) == (1.0, 1.0, 60)
    assert [cost.declared for cost in costs] == [1.0, 0.5, 0.95]
    assert 0.3 < half.recall < most.recall <= 1
    for name in ("pages", "reads"):
        assert sum(getattr(cost, name) for cost in costs) == pytest.approx((after[name] - before[name]) / 20)
    assert [cost.scanned for cost in costs] == scanned
    assert half.pages < most.pages < all_.pages
    assert all(0 < cost.p50_ms <= cost.p99_ms for cost in costs)


def test_share_found() -> None:
    assert share_found(np.array([1, 2, 3]), np.array([[1, 9], [9, 9], [9, 3]])) == pytest.approx(2 / 3)


def start(folder: Path, *options: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "from memhier.benchmarks.cli.main import main; main()",
        "demo",
        "--dir",
        str(folder),
        *options,
    ]


def runs(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # ended, and waiting for init to notice


def stop_while_reading(folder: Path, number: signal.Signals) -> None:
    """Run the demo on the real installation, stop it while it reads, and see that all of its processes end."""
    process = subprocess.Popen(start(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 800
    listings = folder / "building" / "functions.jsonl"
    while not listings.exists() or not listings.stat().st_size:
        assert process.poll() is None, "the demo ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children or len(os.sched_getaffinity(0)) == 1
    process.send_signal(number)
    process.wait(800)
    while any(map(runs, children)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
def test_a_killed_demo_starts_again_cleanly(tmp_path: Path) -> None:
    stop_while_reading(tmp_path / "d", signal.SIGKILL)
    assert (tmp_path / "d" / "building").exists()
    command = start(tmp_path / "d", "--limit", "60", "--query", "parse")
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / "d" / "building").exists()
    assert (tmp_path / "d" / "current" / "built.json").exists()


def test_a_terminated_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    stop_while_reading(tmp_path / "d", signal.SIGTERM)
    assert not (tmp_path / "d" / "building").exists()


def test_a_disk_without_room_is_told_in_plain_words(tmp_path: Path) -> None:
    *python, program, name, option, folder = start(tmp_path / "d")
    program = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, 800_000)); {program}"
    command = [*python, program, name, option, folder, "--limit", "1000", "--query", "parse"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Error: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "d" / "current").exists()

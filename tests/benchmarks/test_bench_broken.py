"""``memhier bench`` where something breaks: a peer in each of its ways, the run itself, its files."""

import json
import lzma
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from memhier.benchmarks.bench import command, runner
from memhier.benchmarks.bench.report import write_report
from memhier.benchmarks.bench.results import Results, Row, hold_alone, read_rows
from memhier.benchmarks.bench.tables import builds_of, problem_rows
from memhier.benchmarks.bench.workload import PeerEntry, Workload
from memhier.benchmarks.cli.main import main
from memhier.benchmarks.generators import mixed
from memhier.errors import LockedError

SMALL = {
    "data": "mixed", "dimension": 8, "vectors": 300, "queries": 4, "rounds": 1, "k": 3, "dram_share": 0.5,
    "sweep_step": 1, "timeout_s": 600,
}  # fmt: skip
FAISS = PeerEntry("faiss", "faiss_lists", efforts=({"nprobe": 100},))
TOY = PeerEntry("toy", "hnswlib", efforts=({"ef": 1},))
# Searches everything, unless the file `how` beside it says what to do wrong.
LIBRARY = """
import os, signal, subprocess, sys, time
from pathlib import Path
import numpy as np

here = Path(__file__).parent
how = (here / "how").read_text()
if how == "import":
    raise ImportError("no such symbol: toy_new")
if how == "hang":
    (here / "grandchild").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    time.sleep(1000)
if how == "words":
    sys.stderr.buffer.write(b"caf\\xe9 \\xff\\n")
    sys.exit(3)


class Index:
    def __init__(self, space, dim):
        self.rows = []

    def init_index(self, *sizes, **more):
        pass

    def add_items(self, block, ids, num_threads):
        self.rows.append(np.array(block))
        if how == "build":
            raise ValueError("cannot build: <b>ü</b>")

    def save_index(self, path):
        np.save(open(path, "wb"), np.concatenate(self.rows))
        if how == "wait":
            (here / "pid").write_text(str(os.getpid()))
            time.sleep(1000)

    def load_index(self, path):
        self.rows = np.load(path)

    def set_ef(self, ef):
        pass

    def knn_query(self, queries, k, num_threads):
        if how == "search":
            raise RuntimeError("lost my way [/b] :x:")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        apart = ((queries[:, None] - self.rows[None]) ** 2).sum(2)
        ids = np.argsort(apart, axis=1)[:, :k]
        if how == "wrong":
            ids = np.full_like(ids, 10**9)
        if how == "few":
            ids = ids[:, :1]
        if how == "batch" and len(queries) > 1:
            ids = ids * 0
        return ids.astype(np.uint64), None
"""


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "profile_device", lambda folder: {"iops": 1})


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


def install_toy(environments: Path, how: str) -> Path:
    """Make an environment whose interpreter finds the library above."""
    home = environments / "hnswlib"
    (home / "bin").mkdir(parents=True)
    (home / "hnswlib.py").write_text(LIBRARY)
    (home / "how").write_text(how)
    (home / "hnswlib-9.9.dist-info").mkdir()
    (home / "hnswlib-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: hnswlib\nVersion: 9.9\n")
    python = home / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{home}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return home


def workload(*peers: PeerEntry, **changed: Any) -> Workload:
    return Workload("small", "search", "A small one.", "search", {}, {}, SMALL | changed, peers)


def run_small(tmp_path: Path, work: Path, load: Workload) -> list[Row]:
    results = Results(tmp_path / "results.jsonl")
    runner.run(runner.Plan([load], "quick", work, tmp_path / "environments"), results, lambda words: None)
    rows = read_rows(tmp_path / "results.jsonl")
    assert rows == results.rows()
    return rows


def recalls(rows: list[Row]) -> dict[str, list[float]]:
    """Return each recall that a peer reached."""
    searches = [row for row in rows if row["kind"] == "search"]
    return {row["peer"]: sorted({point["recall"] for point in row["rows"]}) for row in searches}


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "stage", "why"),
    [
        ("import", "build", "hnswlib: build ended with 1: ImportError: no such symbol: toy_new"),
        ("build", "build", "hnswlib: build ended with 1: ValueError: cannot build: <b>ü</b>"),
        ("words", "build", "hnswlib: build ended with 3: caf� �"),
        ("search", "search", "hnswlib: search ended with 1: RuntimeError: lost my way [/b] :x:"),
        ("kill", "search", "hnswlib: search was killed by SIGKILL: no words"),
    ],
)
def test_a_broken_peer_is_told_and_the_others_are_measured(
    how: str, stage: str, why: str, tmp_path: Path, work: Path
) -> None:
    home = install_toy(tmp_path / "environments", how)
    rows = run_small(tmp_path, work / how, workload(TOY, FAISS))
    assert [cells[1:] for cells in problem_rows(rows)] == [["toy", f"failed ({stage})", why]]
    assert recalls(rows) == {"faiss": [1]}
    text = write_report(rows, "today")
    assert "cannot build: &lt;b&gt;ü" in text or how != "build"
    if stage == "search":
        (built,) = (cells for cells in builds_of(rows, "small", "quick") if cells[0] == "toy")
        assert "not searched" in built
    (home / "how").write_text("")
    again = run_small(tmp_path, work / how, workload(TOY, FAISS))
    assert problem_rows(again) == []
    assert recalls(again) == {"faiss": [1], "toy": [1]}


@pytest.mark.long
def test_a_peer_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, work: Path) -> None:
    home = install_toy(tmp_path / "environments", "hang")
    for seconds in (4, 16, 64, 256):  # until the machine is fast enough to start a grandchild in time
        rows = run_small(tmp_path, work, workload(TOY, timeout_s=seconds))
        assert [cells[3] for cells in problem_rows(rows)] == [f"hnswlib: build took longer than {seconds} s"]
        if (home / "grandchild").exists():
            break
    assert_ended(int((home / "grandchild").read_text()))


@pytest.mark.parametrize(("how", "recall"), [("", 1), ("wrong", 0), ("few", 1 / 3)])
def test_answers_count_for_what_they_are(how: str, recall: float, tmp_path: Path) -> None:
    install_toy(tmp_path / "environments", how)
    # Of three vectors every one is a true neighbour, whichever an answer is made up with.
    rows = run_small(tmp_path, tmp_path / "work", workload(TOY, vectors=3))
    assert problem_rows(rows) == []
    assert recalls(rows)["toy"] == [pytest.approx(recall)]


def test_what_an_adapter_does_before_it_runs_stops_no_other(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run_small(tmp_path, work, workload(PeerEntry("odd", "no_such_adapter"), FAISS))
    (problem,) = problem_rows(rows)
    assert problem[1:3] == ["odd", "failed (build)"]
    assert "no_such_adapter" in problem[3]
    own = tmp_path / "environments" / "faiss-cpu" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    rows = run_small(tmp_path, work, workload(FAISS))
    assert "does not run: " in {cells[1]: cells[3] for cells in problem_rows(rows)}["faiss"]
    own.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without the packages of this environment
    own.chmod(0o755)
    rows = run_small(tmp_path, work, workload(FAISS))
    why = {cells[1]: cells[3] for cells in problem_rows(rows)}["faiss"]
    assert "has no faiss-cpu: memhier bench install search" in why


def test_data_that_came_later_leave_no_complaint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMHIER_DATA", str(tmp_path))
    load = workload(FAISS, data="sift-imagenet200k")
    assert [cells[2] for cells in problem_rows(run_small(tmp_path, tmp_path / "work", load))] == ["skipped (data)"]
    folder = tmp_path / "sift-imagenet200k"
    folder.mkdir()

    def write(name: str, count: int, cut: int = 0) -> None:
        with lzma.open(folder / name, "wb") as file:
            np.save(file, np.arange(count * 8, dtype=np.uint8).reshape(count, 8))
        (folder / name).write_bytes((folder / name).read_bytes()[: -cut or None])

    write("query_u8.npy.xz", 4)
    write("base_u8.npy.xz", 300, cut=20)
    (problem,) = problem_rows(run_small(tmp_path, tmp_path / "work", load))
    assert problem[2] == "failed (run)"
    assert "base_u8.npy.xz" in problem[3]
    write("base_u8.npy.xz", 300)
    assert problem_rows(run_small(tmp_path, tmp_path / "work", load)) == []


RUN = """
import sys
from pathlib import Path
from memhier.benchmarks.bench import runner
from memhier.benchmarks.bench.results import Results
sys.path.insert(0, str(Path({here!r}).parent))
from test_bench_broken import TOY, workload
runner.profile_device = lambda folder: {{}}
place = Path({place!r})
plan = runner.Plan([workload(TOY)], "quick", place / "work", place / "environments")
runner.run(plan, Results(place / "results.jsonl"), lambda words: None)
"""


def test_a_run_killed_while_a_peer_builds_leaves_nothing_behind_that_misleads_the_next(tmp_path: Path) -> None:
    home = install_toy(tmp_path / "environments", "wait")
    run = subprocess.Popen([sys.executable, "-c", RUN.format(here=__file__, place=str(tmp_path))])
    try:
        wait_for(lambda: (home / "pid").exists() and (home / "pid").read_text() != "")
    finally:
        run.kill()
        run.wait()
    assert_ended(int((home / "pid").read_text()))
    assert [cells[2] for cells in problem_rows(read_rows(tmp_path / "results.jsonl"))] == ["interrupted (quick)"]
    (tmp_path / "work" / "scratch" / "of a script").mkdir()
    (home / "how").write_text("")
    rows = run_small(tmp_path, tmp_path / "work", workload(TOY))
    assert problem_rows(rows) == []
    assert recalls(rows) == {"toy": [1]}
    assert list((tmp_path / "work" / "scratch").iterdir()) == []


def wait_for(happened: Callable[[], bool]) -> None:
    while not happened():  # the whole test has a time limit
        time.sleep(0.02)


def assert_ended(pid: int) -> None:
    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    wait_for(gone)


def test_an_index_that_is_half_there_is_built_again(tmp_path: Path) -> None:
    install_toy(tmp_path / "environments", "")
    rows = run_small(tmp_path, tmp_path / "work", workload(TOY))
    (figures,) = (tmp_path / "work" / "indexes").rglob("toy-*.json")
    for file in figures.with_suffix("").iterdir():
        file.unlink()
    figures.with_suffix("").rmdir()
    (tmp_path / "results.jsonl").unlink()
    assert problem_rows(run_small(tmp_path, tmp_path / "work", workload(TOY))) == []
    assert recalls(rows) == {"toy": [1]}


def test_truth_of_another_k_is_not_taken(tmp_path: Path) -> None:
    install_toy(tmp_path / "environments", "")
    run_small(tmp_path, tmp_path / "work", workload(TOY))
    assert recalls(run_small(tmp_path, tmp_path / "work", workload(TOY, k=5))) == {"toy": [1]}


def test_a_batch_that_finds_less_does_not_count(tmp_path: Path) -> None:
    install_toy(tmp_path / "environments", "batch")
    rows = run_small(tmp_path, tmp_path / "work", workload(TOY))
    (point,) = next(row for row in rows if row["kind"] == "search")["rows"]
    assert point["batch_recall"] < 0.5 < point["recall"]


def whole(**row: Any) -> Row:
    return {"workload": "w", "size": "quick"} | row


def test_a_file_of_results_survives_what_may_happen_to_it(tmp_path: Path) -> None:
    path = tmp_path / "é r.jsonl"
    results = Results(path)
    results.add("a", **whole(kind="failed", why="x"))
    assert not results.is_done("a")
    results.add("a", **whole(kind="data"))
    results.add("b", **whole(kind="data", more="x" * 20_000))
    assert Results(path).is_done("a")
    text = path.read_text()
    for cut in (1, 2, 19_000, len(text.splitlines()[-1])):
        path.write_text(text[:-cut])
        again = Results(path)
        assert again.is_done("b") == (cut == 1)  # all but the end of its line
        again.add("c", **whole(kind="data"))
        assert {row["task"] for row in read_rows(path)} == {row["task"] for row in again.rows()}
    for bad in (b"half\n", b"3\n", b"[1]\n", b'{"task": []}\n', b'{"task": "a"}\n', b"\xff\x00\n"):
        path.write_bytes(text.encode() + bad + text.encode())
        with pytest.raises(ValueError, match=r"r\.jsonl, line 4: not a row of results"):
            read_rows(path)


def test_rows_of_another_version_are_told_and_run_again(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    old = [
        whole(task="w/quick/p/build", kind="build", peer="p"),
        whole(task="w/quick/p/search/0", kind="search", peer="p", round=0, rows=[{"effort": {}}], held_bytes=0,
              settings=""),
        whole(task="s/quick", kind="script", figures={"results": []}, words="", command="", settings="", wall_s=1),
        {"task": "machine/1", "kind": "machine"},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in old))
    rows = read_rows(path)
    assert [row["kind"] for row in rows] == ["failed"] * 4
    assert "another version" in write_report(rows, "today", rows)
    assert not any(Results(path).is_done(row["task"]) for row in old)
    for words in (["report", str(path), "--out", str(tmp_path / "r.html")], ["papers", str(path)],
                  ["compare", str(path), str(path)], ["report", str(path), "--markdown"]):  # fmt: skip
        assert CliRunner().invoke(main, ["bench", *words], catch_exceptions=False).exit_code == 0


def test_two_runs_do_not_share_a_file_or_a_folder(tmp_path: Path) -> None:
    path, other = tmp_path / "r.jsonl", tmp_path / "work" / "lock"
    other.parent.mkdir()
    place = ["--results", str(path), "--work", str(other.parent), "--envs", str(tmp_path)]
    for held in (path, other):
        with hold_alone(held, "it"):
            with pytest.raises(LockedError, match="in use by another run"), hold_alone(held, "it"):
                pass
            told = CliRunner().invoke(main, ["bench", "run", "search-mixed", *place], catch_exceptions=False)
            assert told.exit_code == 1
            assert f"{held} is in use by another run" in told.output.replace("\n", "")
    assert read_rows(path) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "--results", "no/such/r.jsonl"], "its folder is missing"),
        (["run", "--report", "no/such/r.html"], "its folder is missing"),
        (["run", "--work", "/dev/null/x"], "Not a directory"),
        (["run", "search-mixd"], "there is no workload 'search-mixd': expected one of"),
        (["run", "search-mixed", "--group", "tiers"], "none of search-mixed is of the group tiers"),
        (["run", "tiers-policies", "--peer", "diskann"], "--peer diskann: no workload asked for has it"),
        (["list", "diskan"], "there is no workload or peer 'diskan'"),
        (["report", "empty.jsonl", "--out", "no/such/r.html"], "its folder is missing"),
        (["report", "random.jsonl"], "random.jsonl, line 1: not a row of results"),
        (["install", "search", "--envs", "empty.jsonl/x"], "no environment at"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(command, "run_plan", never)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "random.jsonl").write_bytes(bytes(range(256)))
    result = CliRunner().invoke(main, ["bench", *words])
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code > 0
    assert told in " ".join(result.output.split())


def test_an_empty_file_of_results_makes_a_report(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").touch()
    out = tmp_path / "ü.html"
    words = ["report", str(tmp_path / "r.jsonl"), "--out", str(out)]
    assert CliRunner().invoke(main, ["bench", *words], catch_exceptions=False).exit_code == 0
    assert "Nothing was measured" in out.read_text(encoding="utf-8")


def test_a_report_is_utf8_whatever_the_terminal_is(tmp_path: Path) -> None:
    row = whole(task="w/quick", kind="failed", why="ü � \udcff")
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    code = "from memhier.benchmarks.cli.main import main; main()"
    words = ["bench", "report", "r.jsonl", "--out", "r.html"]
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, env=environment, capture_output=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ü � \\udcff" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_an_interrupted_run_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(plan: runner.Plan, results: Results, say: Any) -> None:
        results.add("w/quick/state", kind="state", state="planned", workload="w", size="quick")
        results.add("w/quick/p/build", kind="failed", workload="w", size="quick", peer="p", why="lost [/b] :x:")
        raise KeyboardInterrupt  # not the signal, which whoever runs in the background may ignore

    monkeypatch.setattr(command, "run_plan", interrupt)
    out = tmp_path / "r.html"
    place = ["--results", str(tmp_path / "r.jsonl"), "--work", str(tmp_path / "work"), "--report", str(out)]
    told = CliRunner().invoke(main, ["bench", "run", "search-mixed", *place])
    assert told.exit_code == 130
    assert "interrupted: the same command goes on" in told.output
    assert "lost [/b] :x:" in told.output  # as it was said, not as markup
    assert "interrupted (quick)" in out.read_text(encoding="utf-8")


def test_generated_data_are_the_same_each_time() -> None:
    # What an interrupted run made and what the next one makes are one data set.
    assert np.array_equal(mixed(50, 8, seed=0).array(), mixed(50, 8, seed=0).array())

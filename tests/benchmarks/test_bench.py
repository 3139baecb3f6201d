"""``memhier bench`` from workload files to the report: it resumes, names missing parts, compares, shares no file."""

import json
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from memhier.benchmarks.bench import command, runner
from memhier.benchmarks.bench.compare import changes
from memhier.benchmarks.bench.figures import Bar, Bars, Curves, Figure, Record, Series
from memhier.benchmarks.bench.papers import measured_on, papers_rows
from memhier.benchmarks.bench.report import write_report
from memhier.benchmarks.bench.results import Results, Row, read_rows
from memhier.benchmarks.bench.summary import METRICS, TARGETS, at_recall, curve, ratios, search_peers
from memhier.benchmarks.bench.tables import problem_rows
from memhier.benchmarks.bench.workload import FOLDER, PeerEntry, Workload, load_workload, load_workloads
from memhier.benchmarks.cli.main import main
from memhier.benchmarks.peers import PEERS

SMALL = {
    "data": "mixed", "dimension": 8, "vectors": 700, "queries": 5, "rounds": 2, "k": 3, "dram_share": 0.5,
    "sweep_step": 1,
    "timeout_s": 600,
}  # fmt: skip
FAISS = PeerEntry("faiss", "faiss_lists", efforts=({"nprobe": 1}, {"nprobe": 100}))


def workload(*peers: PeerEntry, **changed: Any) -> Workload:
    return Workload("small", "search", "A small one.", "search", {}, {}, SMALL | changed, peers)


def run_small(tmp_path: Path, load: Workload) -> list[Row]:
    results = Results(tmp_path / "results.jsonl")
    plan = runner.Plan([load], "quick", tmp_path / "work", tmp_path / "environments")
    runner.run(plan, results, lambda words: None)
    return read_rows(tmp_path / "results.jsonl")


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "profile_device", lambda folder: {"iops": 1})
    monkeypatch.setattr("memhier.benchmarks.peers.process._IMPORTED", {"faiss-cpu": "faiss", "diskannpy": "no_such"})


def test_a_run_measures_reports_what_is_missing_and_resumes(tmp_path: Path) -> None:
    load = workload(FAISS, PeerEntry("broken", "faiss_lists", build={"lists_per_sqrt_n": "x"}),
                    PeerEntry("missing", "diskann"))  # fmt: skip
    rows = run_small(tmp_path, load)
    kinds = {row["task"]: row["kind"] for row in rows if row["kind"] not in ("machine", "state", "data")}
    assert kinds == {
        "small/quick/faiss/build": "build",
        "small/quick/broken/build": "failed",
        "small/quick/missing/build": "failed",
        "small/quick/faiss/search/0": "search",
        "small/quick/faiss/search/1": "search",
    }
    why = {row["peer"]: row["why"] for row in rows if row["kind"] == "failed"}
    assert "memhier bench install search" in why["missing"]
    assert "faiss_lists: build ended with 1" in why["broken"]
    points = curve(search_peers(rows, "small", "quick")["faiss"])
    assert points[-1].recall == points[-1].recall_id == 1
    lines = len((tmp_path / "results.jsonl").read_text().splitlines())
    assert len(run_small(tmp_path, load)) == len(rows) + 1  # the machine of the second run
    # Only the machine, that the workload began and ended, and the two failures are written again.
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == lines + 5
    changed = run_small(tmp_path, workload(replace(FAISS, efforts=({"nprobe": 2},))))
    points = curve(search_peers(changed, "small", "quick")["faiss"])
    assert [point.effort for point in points] == [{"nprobe": 2, "read_ahead": ahead} for ahead in (1, 0)]


def test_a_run_cut_short_goes_on(tmp_path: Path) -> None:
    rows = run_small(tmp_path, workload(FAISS))
    file = tmp_path / "results.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert "search/1" in lines[-2]
    file.write_text("".join(lines[:-2]) + lines[-2][:50])
    assert [cells[:3] for cells in problem_rows(read_rows(file))] == [["small", "", "interrupted (quick)"]]
    assert "interrupted (quick)" in write_report(read_rows(file), "today")
    again = run_small(tmp_path, workload(FAISS))
    assert problem_rows(again) == []
    assert {row["task"] for row in again} >= {row["task"] for row in rows}
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_a_workload_that_breaks_does_not_stop_the_next(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    broken = replace(workload(FAISS), name="broken", parameters={"data": "mixed", "vectors": 5})
    plan = runner.Plan([broken, workload(FAISS)], "quick", tmp_path / "work", tmp_path / "environments")
    runner.run(plan, results, lambda words: None)
    (problem,) = problem_rows(results.rows())
    assert problem == ["broken", "", "failed (run)", "KeyError: 'dimension'"]
    assert "small/quick/faiss/search/1" in {row["task"] for row in results.rows()}


def test_an_interrupted_command_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load_workloads", lambda: [workload(FAISS), replace(workload(FAISS), name="second")])
    search = runner.run_search

    def stop_at_second(load: Workload, *arguments: Any) -> None:
        if load.name == "second":
            raise KeyboardInterrupt
        search(load, *arguments)

    monkeypatch.setattr(runner, "run_search", stop_at_second)
    words = ["run", "--results", str(tmp_path / "r.jsonl"), "--work", str(tmp_path / "work"), "--envs", str(tmp_path)]
    told = CliRunner().invoke(main, ["bench", *words])
    assert told.exit_code == 130
    assert "interrupted: the same command goes on" in told.output
    rows = read_rows(tmp_path / "r.jsonl")
    assert "small/quick/faiss/search/1" in {row["task"] for row in rows}
    assert [cells[0] for cells in problem_rows(rows)] == ["second"]
    monkeypatch.setattr(runner, "run_search", search)
    assert CliRunner().invoke(main, ["bench", *words], catch_exceptions=False).exit_code == 0
    assert problem_rows(read_rows(tmp_path / "r.jsonl")) == []


def test_missing_data_are_skipped_with_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMHIER_DATA", str(tmp_path / "nowhere"))
    rows = run_small(tmp_path, workload(FAISS, data="mnist"))
    skipped = [row for row in rows if row["kind"] == "skipped"]
    assert len(skipped) == 1
    assert "nowhere" in skipped[0]["why"]
    script = Workload("traces", "tiers", "", "script", {}, {}, {"module": "tiers.policies", "timeout_s": 600}, ())
    rows = run_small(tmp_path, script)
    assert [cells[2] for cells in problem_rows(rows) if cells[0] == "traces"] == ["skipped (run)"]


def test_the_folder_of_data_is_named_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMHIER_DATA", str(tmp_path / "elsewhere"))  # and set back after --data changed it
    place = ["--results", str(tmp_path / "r.jsonl"), "--work", str(tmp_path / "work"), "--envs", str(tmp_path)]
    words = ["run", "tiers-policies", "search-sift1m", "--data", str(tmp_path / "named"), *place]
    told = CliRunner().invoke(main, ["bench", *words], catch_exceptions=False)
    assert told.exit_code == 0
    said = told.stderr.splitlines()
    assert any(line.endswith("measuring the device") for line in said), said  # in a file a line is filled with nothing
    problems = problem_rows(read_rows(tmp_path / "r.jsonl"))
    assert {name for name, _, _, _ in problems} == {"tiers-policies", "search-sift1m"}
    for _, _, what, why in problems:
        assert what.startswith("skipped")
        assert str(tmp_path / "named") in why


def test_a_script_keeps_its_figures_and_words(tmp_path: Path) -> None:
    sizes = ["--rows", " 3000", "--batch", "64", "--batches", "3", "--rounds", "2", "--dram", "8MiB"]
    parameters = {"module": "tiers.tiered", "arguments": sizes, "timeout_s": 600, "on_device": True}
    row = run_small(tmp_path, Workload("gather", "tiers", "", "script", {}, {}, parameters, ()))[-1]
    assert row["kind"] == "script", row
    assert "seconds a batch, every turn" in row["words"]
    assert len(row["figures"]["turns"]) == 12  # two kinds of computing, three ways, two rounds
    assert str(tmp_path) not in row["command"]
    assert "tiers.tiered --rows ' 3000' --batch" in row["command"]  # to be pasted into a shell


def test_every_workload_file_is_one() -> None:
    loads = load_workloads()
    assert {load.group for load in loads} >= {"search", "tiers"}
    assert len({load.name for load in loads}) == len(loads)
    for load in loads:
        assert load.function in ("search", "script")
        assert {peer.adapter for peer in load.peers} <= set(PEERS)
        for size in ("quick", "full"):
            parameters = load.at(size)
            assert parameters["timeout_s"] > 0
            if load.function == "script":
                assert (FOLDER / f"{parameters['module'].replace('.', '/')}.py").is_file()
            else:
                assert set(SMALL) - {"dimension", "vectors"} <= set(parameters)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 3 4", "workload.toml"),
        ("name = 'x'", "no 'about'|no 'function'|no 'group'|no 'quick'|no 'full'"),
        ("{whole}\nsurprise = 1", "surprise"),
        ("{whole}\n[[peers]]\nname='a'\nadapter='b'\n[[peers]]\nname='a'\nadapter='c'", "two peers"),
        ("{whole}\n[[peers]]\nname='a'\nadapter='b'\nspeed=1", "peer a: .*speed"),
    ],
)
def test_a_bad_workload_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "workload.toml"
    whole = "name='x'\ngroup='search'\nabout=''\nfunction='search'\nquick={}\nfull={}"
    path.write_text(text.replace("{whole}", whole))
    with pytest.raises(ValueError, match=words):
        load_workload(path)


def test_a_workload_file_starts_from_another(tmp_path: Path) -> None:
    (tmp_path / "first.toml").write_text(
        "name='first'\ngroup='search'\nabout=''\nfunction='search'\nquick={a=1, b=2}\nfull={}\nparameters={k=10}\n"
        "[[peers]]\nname='p'\nadapter='diskann'\nbuild={code_bytes=32, R=64}\n[[peers]]\nname='q'\nadapter='usearch'\n"
    )
    (tmp_path / "second.toml").write_text(
        "name='second'\nlike='first'\n[quick]\nb=3\n[parameters]\ncode_bytes=56\n[[peers]]\nname='q'\nefforts=[{e=1}]\n"
    )
    second = load_workload(tmp_path / "second.toml")
    assert (second.name, second.group, second.at("quick")["a"], second.at("quick")["b"]) == ("second", "search", 1, 3)
    assert second.at("full")["k"] == 10
    builds = {peer.name: (peer.adapter, peer.build, peer.efforts) for peer in second.peers}
    assert builds == {"p": ("diskann", {"code_bytes": 56, "R": 64}, ()), "q": ("usearch", {}, ({"e": 1},))}
    assert load_workload(tmp_path / "first.toml").peers[0].build == {"code_bytes": 32, "R": 64}
    (tmp_path / "second.toml").write_text("name='second'\nlike='third'\n")
    with pytest.raises(FileNotFoundError, match=r"third\.toml"):
        load_workload(tmp_path / "second.toml")


def search_row(peer: str, turn: int, points: list[tuple[float, float]], **fixed: float) -> Row:
    """Return a row with a point for each recall and CPU milliseconds."""
    made = [
        {"effort": {"e": n}, "recall": recall, "recall_id": recall, "cpu_ms": cpu, "mean_ms": cpu, "p50_ms": cpu,
         "p99_ms": cpu, "pages": 10 * cpu, "private_bytes": 0, "cached_bytes": 0} | fixed
        for n, (recall, cpu) in enumerate(points)
    ]  # fmt: skip
    return {"task": f"w/quick/{peer}/search/{turn}", "kind": "search", "workload": "w", "size": "quick", "peer": peer,
            "round": turn, "rows": made, "held_bytes": 0, "io": "direct", "settings": ""}  # fmt: skip


def test_figures_at_a_recall() -> None:
    points = curve([search_row("p", 0, [(0.9, 1.0), (0.96, 2.0), (0.98, 5.0), (0.97, 9.0)])])
    assert at_recall(points, 0.93, "cpu_ms") == (pytest.approx(1.5), "interpolated between 0.900 and 0.960")
    assert at_recall(points, 0.96, "cpu_ms") == (2.0, "measured at 0.960")
    # An effort that costs more and finds less is no neighbour.
    assert at_recall(points, 0.97, "cpu_ms") == (pytest.approx(3.5), "interpolated between 0.960 and 0.980")
    assert at_recall(points, 0.5, "cpu_ms") == (1.0, "measured at 0.900")
    assert at_recall(points, 0.981, "cpu_ms") is None
    rate = at_recall(points, 0.96, "qps_core")
    assert rate is not None
    assert rate[0] == pytest.approx(500)


@given(st.lists(st.tuples(st.floats(0.5, 1), st.floats(0.01, 100)), min_size=1, max_size=8), st.floats(0.5, 1))
def test_a_figure_at_a_recall_is_never_better_than_the_best_effort_below(
    points: list[tuple[float, float]], target: float
) -> None:
    found = at_recall(curve([search_row("p", 0, points)]), target, "cpu_ms")
    reaching = [cpu for recall, cpu in points if recall >= target]
    assert (found is None) == (not reaching)
    if found is not None:
        assert min(cpu for _, cpu in points) * (1 - 1e-9) <= found[0] <= min(reaching) * (1 + 1e-9)


def test_ratios_are_taken_round_by_round() -> None:
    ours = [search_row("a", n, [(0.9, cpu), (0.99, cpu)]) for n, cpu in enumerate((1.0, 2.0))]
    theirs = [search_row("b", n, [(0.9, cpu), (0.99, cpu)]) for n, cpu in enumerate((4.0, 4.0))]
    assert ratios(ours, theirs, 0.95, "cpu_ms") == [4, 2]
    assert ratios(ours, theirs, 0.95, "qps_core") == pytest.approx([4, 2])
    assert ratios(ours, theirs, 0.999, "cpu_ms") == []


@pytest.mark.parametrize(
    ("new", "verdicts"),
    [
        ([1.0, 1.05], {"same"}),
        ([1.5, 1.5], {"worse", "same"}),  # the time of the slowest is as it was
        ([0.5, 0.5], {"better", "same"}),
        ([1.0, 3.0], {"same"}),  # the new rounds differ among themselves by more than they do from the old
    ],
)
def test_changes_within_noise_are_none(new: list[float], verdicts: set[str]) -> None:
    old_rows = [search_row("p", n, [(0.9, 1.0), (0.995, 1.0)]) for n in range(2)]
    new_rows = [search_row("p", n, [(0.9, cpu), (0.995, cpu)], p99_ms=1.0) for n, cpu in enumerate(new)]
    found = changes(old_rows, new_rows)
    assert {change.verdict for change in found} == verdicts
    assert len(found) == len(METRICS) * len(TARGETS)


def test_the_clock_of_a_loaded_machine_is_no_regression() -> None:
    old, new = (search_row("p", 0, [(0.9, cpu), (0.995, cpu)], pages=5.0, cpu_ms=1.0) for cpu in (1.0, 2.0))
    for load, verdict in ((0.1, "worse"), (2.0, "slower on the clock")):
        machine = {"task": "machine/1", "kind": "machine", "load": load}
        found = {change.metric: change.verdict for change in changes([old], [machine, new])}
        assert found["p50_ms"] == found["qps_wall"] == verdict
        assert found["pages"] == found["cpu_ms"] == "same"


def test_a_loaded_machine_blurs_times_but_not_reads() -> None:
    old, new = (search_row("p", 0, [(0.9, cpu), (0.995, cpu)], p99_ms=1.0) for cpu in (1.0, 1.4))
    for load, verdict in ((0.1, "worse"), (2.0, "same")):
        found = {c.metric: c.verdict for c in changes([old], [{"task": "m", "kind": "machine", "load": load}, new])}
        assert found["cpu_ms"] == verdict
        assert found["pages"] == "worse"


def script_row(figures: list[Figure], settings: str = "", **record: Any) -> Row:
    made = json.loads(json.dumps(asdict(Record(figures, **record))))
    return {"task": "s/quick", "kind": "script", "workload": "s", "size": "quick", "settings": settings,
            "figures": made, "words": "<words>", "command": "python -m s", "wall_s": 1.0}  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (([1.0, 1.1], "less", False), ([1.3, 1.4], "less", False), "worse"),
        (([1.0, 1.1], "less", False), ([0.7, 0.8], "less", False), "better"),
        (([1.0, 1.1], "more", False), ([1.3, 1.4], "more", False), "better"),
        (([1.0, 1.1], "more", False), ([0.7, 0.8], "more", False), "worse"),
        (([1.0, 1.1], "neither", False), ([1.3, 1.4], "neither", False), "changed"),
        (([1.0, 1.35], "less", False), ([1.3, 1.4], "less", False), "same"),  # the rounds meet
        (([1.0], "less", False), ([1.08], "less", False), "same"),  # less than a tenth
        (([1.0], "less", True), ([1.01], "less", True), "worse"),  # counted, so any change is one
        (([0.0], "less", True), ([0.0], "less", True), "same"),
        (([-1.0], "more", False), ([-3.0], "more", False), "worse"),
    ],
)
def test_figures_of_scripts_are_compared(old: Any, new: Any, verdict: str) -> None:
    rows = [
        script_row([Figure.of("f", values, "ms", better, exact=exact), Figure.of(name, 1, "ms", "less")])
        for name, (values, better, exact) in (("gone", old), ("come", new))
    ]
    found = changes([rows[0]], [rows[1]])
    assert [(change.where, change.metric, change.verdict) for change in found] == [("s (quick)", "f, ms", verdict)]


def test_what_cannot_be_compared_or_run_any_more_is_told() -> None:
    old, new = (script_row([Figure.of("f", 1, "ms", "less")], settings) for settings in ("--rounds 2", "--rounds 5"))
    assert [change.verdict for change in changes([old], [new])] == ["other settings"]
    failed = {"task": "s/quick", "kind": "failed", "workload": "s", "size": "quick", "stage": "run", "why": "x"}
    assert [(change.metric, change.verdict) for change in changes([old], [failed])] == [("measured", "worse")]
    assert changes([failed], [old]) == []
    peer = search_row("p", 0, [(0.9, 1.0)])
    whole = failed | {"task": "w/quick", "workload": "w"}
    assert [change.verdict for change in changes([peer], [whole])] == ["worse"]
    broken = failed | {"task": "w/quick/p/search/0", "workload": "w", "peer": "p"}
    assert [change.where for change in changes([peer], [broken])] == ["w (quick) p"]


def test_a_recall_no_longer_reached_is_worse() -> None:
    old, new = search_row("p", 0, [(0.9, 1.0), (0.995, 1.0)]), search_row("p", 0, [(0.9, 1.0), (0.96, 1.0)])
    assert [(c.metric, c.verdict) for c in changes([old], [new]) if "0.99" in c.where] == [("reached", "worse")]
    assert [(c.metric, c.verdict) for c in changes([new], [old]) if "0.99" in c.where] == [("reached", "better")]


class _Checked(HTMLParser):
    """Holds every tag to its end, and every address to this file."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        assert tag != "script"
        for name, value in attrs:
            assert name not in ("src", "href") or value == "data:,", value
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_whole_file(tmp_path: Path) -> None:
    rows = run_small(tmp_path, workload(FAISS, PeerEntry("<i>missing", "diskann")))
    text = write_report(rows, "today", rows)
    page = _Checked()
    page.feed(text)
    assert page.open == []
    assert page.seen["svg"] == 4
    assert page.seen["circle"] >= 6  # two efforts; without reads, where the kernel counts none, one plot is empty
    assert "&lt;i&gt;missing" in text
    assert "<i>missing" not in text
    assert "None beyond noise" in text
    assert str(tmp_path) not in text


def test_a_script_stands_in_the_report_and_beside_its_paper() -> None:
    figure = Figure.of("times full softmax", [7.0, 8.0, 9.0], "times", "more", paper="FGD")
    lines = [Curves("c", "x", "y", [Series("s", [(1.0, 2.0)])])]
    row = script_row([figure], curves=lines, bars=[Bars("b", "%", [Bar.of("one", 3)])], scale="50,000 words")
    text = write_report([row], "today", [row])
    page = _Checked()
    page.feed(text)
    assert page.open == []
    assert page.seen["svg"] == 2
    assert "&lt;words&gt;" in text
    measured = {cells[0].split()[0]: cells[2:] for cells in papers_rows([row])}
    assert measured["FGD"][0] == "s (quick): times full softmax: 8 times (7 to 9)"
    assert "50,000 words" in measured["FGD"][1]
    assert measured["CarM"][0] == measured["Bagpipe"][0] == "not yet"


def test_a_script_that_declares_no_figures_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "memhier_bench_sample.py"
    module.write_text(
        "import os, sys\nassert os.environ['OMP_NUM_THREADS'] == '1'\nopen(sys.argv[2], 'w').write('{\"rounds\": 3}')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("memhier.benchmarks.bench.script_group.MODULES", "")
    load = Workload("s", "tiers", "", "script", {}, {}, {"module": module.stem, "timeout_s": 600}, ())
    row = run_small(tmp_path, load)[-1]
    assert (row["kind"], row["stage"]) == ("failed", "figures")
    assert "figures" in row["why"]


def test_the_papers_wait_for_their_systems() -> None:
    assert {cells[2] for cells in papers_rows([])} == {"not yet"}
    rows = [search_row(peer, 0, [(0.9, cpu), (0.99, cpu)]) for peer, cpu in (("memhier", 1.0), ("diskann", 4.0))]
    assert "diskann: 4 times its queries a CPU second, its reads 4 times ours" in papers_rows(rows)[0][2]
    for row in list(rows):
        row["rows"] = [point | {"private_bytes": 1000, "cached_bytes": 24} for point in row["rows"]]
        rows.append(row | {"kind": "build", "task": f"build/{row['peer']}", "vectors": 10})
    # Ten vectors in a KB, at 1,000 and 250 queries a CPU second.
    assert "recall 0.95, VQ 10,000:" in papers_rows(rows)[0][2]
    assert "times ours (VQ 2,500)" in papers_rows(rows)[0][2]
    # A peer that did as well with a tenth of the memory is judged by that.
    (point, *_), ahead = rows[1]["rows"], {"e": 9, "read_ahead": 0}
    rows[1]["rows"] += [
        point | {"effort": ahead, "recall": 0.96, "cpu_ms": 4.0, "private_bytes": 0, "cached_bytes": 102.4}
    ]
    assert "times ours (VQ 25,000)" in papers_rows(rows)[0][2]


def test_the_command(tmp_path: Path) -> None:
    invoke = CliRunner().invoke
    place = ["--envs", str(tmp_path)]
    listed = invoke(main, ["bench", "list", *place], env={"COLUMNS": "80"}, catch_exceptions=False)
    assert listed.exit_code == 0
    assert "…" not in listed.output  # which is no terminal
    for name in (*PEERS, *(load.name for load in load_workloads())):
        assert any(line.startswith(f"{name} ") for line in listed.output.splitlines())
    told = invoke(main, ["bench", "list", "diskann", "search-sift", *place], catch_exceptions=False).output
    assert "no counter of reads" in told
    assert "dram_share 0.8" in told
    assert "tiers-policies" not in told
    told = invoke(main, ["bench", "list", "--verbose", *place], catch_exceptions=False).output
    assert "no counter of reads" in told
    assert "module tiers.policies" in told
    assert "there is no workload 'x'" in invoke(main, ["bench", "run", "x"]).output
    assert "'x' is not one of 'search'" in invoke(main, ["bench", "run", "--group", "x"]).output
    assert "tiers ask for no other packages" in invoke(main, ["bench", "install", "tiers"]).output
    assert "--peer x" in invoke(main, ["bench", "run", "--peer", "x"]).output
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    for path, cpu in ((old, 1.0), (new, 2.0)):
        path.write_text(json.dumps(search_row("p", 0, [(0.9, cpu), (0.995, cpu)])) + "\n")
    assert invoke(main, ["bench", "compare", str(old), str(old)]).exit_code == 0
    assert invoke(main, ["bench", "compare", str(old), str(new)]).exit_code == 1
    out = tmp_path / "report.html"
    made = invoke(main, ["bench", "report", str(new), "--out", str(out), "--compare", str(old)], catch_exceptions=False)
    assert made.exit_code == 0
    assert "worse" in out.read_text()
    assert "not yet" in invoke(main, ["bench", "papers", str(new)]).output
    shipped = invoke(main, ["bench", "papers"], catch_exceptions=False).output
    assert "not yet" not in shipped
    assert "Measured 20" in shipped


def test_the_papers_name_machine_and_date() -> None:
    machine = {"kind": "machine", "date": "2026-01-31", "processor": "A", "cores": 2, "memory": "8 kB", "memhier": "1"}
    assert measured_on([machine]) == "Measured 2026-01-31 on A, 2 cores, 8 kB of memory; memhier 1."
    assert measured_on([]) == ""


def test_the_papers_say_their_own_claims() -> None:
    claims = {cells[0].split()[0]: " ".join(cells) for cells in papers_rows([])}
    assert "billions" not in claims["Zoom"]
    assert "over training without a cache" not in claims["Bagpipe"]
    assert "6.2 in its first version" in claims["Bagpipe"]

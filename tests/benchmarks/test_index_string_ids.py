"""``memhier index`` where vectors are called by strings: a column of a Parquet file, or lines of text."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memhier.ann import ZoomIndex
from memhier.ann.files import write_vectors
from memhier.benchmarks.cli.main import main

VECTORS = np.random.default_rng(0).normal(size=(400, 12)).astype(np.float32)
NAMES = [f"Straße {row}\u2028" for row in range(400)]  # which ends with what str.splitlines() takes for a line's end


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["index", *map(str, arguments)])


def figures(*arguments: object) -> dict:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def write_table(path: Path, start: int, stop: int, **more: list) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"title": NAMES[start:stop], "row": list(range(start, stop)), "v": list(VECTORS[start:stop])} | more
    parquet.write_table(arrow.table(columns), path)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    table = write_table(tmp_path / "x.parquet", 0, 300)
    found = figures("build", tmp_path / "index", table, "--id-column", "title", "--dram", "4MiB")
    assert (found["vectors"], found["id_kind"]) == (300, "str")
    return tmp_path


def test_a_column_of_strings_names_the_vectors(place: Path) -> None:
    table = write_table(place / "more.parquet", 300, 400)
    assert figures("add", place / "index", table, "--id-column", "title")["vectors"] == 400
    assert figures("remove", place / "index", table, "--id-column", "title")["vectors"] == 300
    write_vectors(place / "more.fvecs", VECTORS[300:])
    figures("add", place / "index", place / "more.fvecs", "--ids", table, "--id-column", "title")
    (place / "gone.txt").write_text("\n".join(NAMES[:2]) + "\n")
    assert figures("remove", place / "index", place / "gone.txt")["removed"] == 2
    assert figures("info", place / "index")["id_kind"] == "str"
    assert run("check", place / "index").exit_code == 0
    with ZoomIndex.open(place / "index") as index:
        np.testing.assert_array_equal(index.reconstruct(NAMES[2:]), VECTORS[2:])


def test_lines_of_text_are_strings_where_it_is_said(tmp_path: Path) -> None:
    write_vectors(tmp_path / "x.fvecs", VECTORS)
    (tmp_path / "ids.txt").write_text("\n".join(map(str, range(1000, 1400))))
    for name, options, kind in (("numbers", [], int), ("strings", ["--string-ids"], str)):
        figures("build", tmp_path / name, tmp_path / "x.fvecs", "--ids", tmp_path / "ids.txt", *options)
        with ZoomIndex.open(tmp_path / name) as index:
            assert index.search(VECTORS[7], 1, recall=1.0).ids.tolist() == [kind(1007)]


def test_a_column_of_integers_and_the_only_column_that_may_be_one(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = write_table(tmp_path / "x.parquet", 0, 400)
    figures("build", tmp_path / "numbers", table, "--id-column", "row")
    parquet.write_table(arrow.table({"title": NAMES}), tmp_path / "titles.parquet")
    figures("build", tmp_path / "strings", table, "--ids", tmp_path / "titles.parquet")
    for place, names in (("numbers", range(400)), ("strings", NAMES)):
        with ZoomIndex.open(tmp_path / place) as index:
            assert index.search(VECTORS, 1, recall=1.0).ids[:, 0].tolist() == list(names)


def test_strings_found_are_written_as_json_lines(place: Path) -> None:
    write_vectors(place / "q.fvecs", VECTORS[:97])
    figures("search", place / "index", place / "q.fvecs", "-k", 3, "--out", place / "found.jsonl")
    rows = [json.loads(line) for line in (place / "found.jsonl").read_text().split("\n")[:-1]]
    with ZoomIndex.open(place / "index") as index:
        found = index.search(VECTORS[:97], 3)
    assert [[row["query"], row["rank"], row["id"], row["distance"]] for row in rows] == [
        [query, rank, found.ids[query, rank], found.distances[query, rank]] for query in range(97) for rank in range(3)
    ]
    result = run("search", place / "index", place / "q.fvecs", "--out", place / "found.jsonl")
    assert result.exit_code == 1
    assert "found.jsonl" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["search", "index", "q.fvecs", "--out", "found.npy"], "expected .parquet or .jsonl"),
        (["search", "index", "q.fvecs", "--truth", "t.ivecs"], "the ids of this index are strings"),
        (["add", "index", "x.parquet"], "ids=None: this index has strings"),
        (["add", "index", "x.parquet", "--id-column", "row"], "this index has strings as ids"),
        (["add", "index", "x.parquet", "--id-column", "title"], "which is in the index already"),
        (["add", "index", "x.parquet", "--id-column", "v"], "--id-column v, expected one of title, row"),
        (["add", "index", "x.parquet", "--ids", "x.parquet"], "no --id-column, expected one of title, row"),
        (["add", "index", "q.fvecs", "--id-column", "title"], "no .parquet file"),
        (["add", "index", "null.parquet", "--id-column", "title"], "1 rows are null"),
        (["remove", "index", "few.txt"], "ids holds 'none', which is not in the index"),
    ],
)
def test_what_fails_says_why_in_a_line_and_changes_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    write_vectors(place / "q.fvecs", VECTORS[:97])
    write_vectors(place / "t.ivecs", np.zeros((97, 10), np.int32))
    write_table(place / "null.parquet", 300, 302, title=["a", None])
    (place / "few.txt").write_text(f"{NAMES[0]}\nnone\n")
    monkeypatch.chdir(place)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert words in result.stderr
    assert not (place / "found.npy").exists()
    with ZoomIndex.open("index") as index:
        assert len(index) == 300

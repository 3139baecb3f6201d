"""``memhier index export`` and ``tune``, and the neighbours that ``search`` prints."""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memhier.ann import ZoomIndex
from memhier.ann.files import open_vectors, write_vectors
from memhier.benchmarks.cli.main import main

VECTORS = np.random.default_rng(0).normal(size=(900, 6)).astype(np.float32)
QUERIES = np.random.default_rng(1).normal(size=(100, 6)).astype(np.float32)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["index", *map(str, arguments)])


def build(path: Path, *, strings: bool = False, dtype: str = "float32") -> None:
    """Make an index in two parts, without every seventh vector, with each kind of attribute and document."""
    rows = np.arange(len(VECTORS))
    names = np.array([f"Straße {row}\u2028" for row in rows], object) if strings else 3 * rows
    attributes = {"price": np.where(rows % 5, rows / 8, np.nan), "year": rows, "id": [f"n{row}" for row in rows],
                  "on": rows % 2 == 0, "day": rows.astype("datetime64[D]")}  # fmt: skip
    documents = {"title": [None if row == 3 else f"title {row}" for row in rows], "more": [{"a": int(r)} for r in rows]}
    vectors = (VECTORS * 30).astype(dtype)
    with ZoomIndex.build(
        path, vectors[:600], ids=names[:600], dram="6MiB",
        attributes={name: values[:600] for name, values in attributes.items()},
        documents={name: values[:600] for name, values in documents.items()},
    ) as index:  # fmt: skip
        index.add(
            vectors[600:], names[600:], {name: values[600:] for name, values in attributes.items()},
            {name: values[600:] for name, values in documents.items()},
        )  # fmt: skip
        index.remove(names[::7])
        index.commit()


@pytest.mark.parametrize("strings", [False, True])
def test_ids_are_lines(tmp_path: Path, strings: bool) -> None:
    build(tmp_path / "index", strings=strings)
    for options, kept in (
        ([], lambda row: True),
        (["--where", "year < 90 and on"], lambda row: row < 90 and row % 2 == 0),
    ):
        result = run("ids", tmp_path / "index", *options)
        assert result.exit_code == 0, result.output
        rows = [row for row in range(len(VECTORS)) if row % 7 and kept(row)]
        expected = [f"Straße {row}\u2028" if strings else str(3 * row) for row in rows]
        assert sorted(result.stdout.split("\n")[:-1]) == sorted(expected)
    assert run("ids", tmp_path / "index", "--where", "year <").exit_code == 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".fvecs", ".parquet"])
def test_an_export_holds_each_vector_once_under_its_id(tmp_path: Path, suffix: str, dtype: str) -> None:
    build(tmp_path / "index", dtype=dtype)
    out = tmp_path / f"out{suffix}"
    result = run("export", tmp_path / "index", out)
    assert result.exit_code == 0, result.output
    if suffix == ".npz":
        with np.load(out) as arrays:
            vectors, ids = arrays["vectors"], arrays["ids"]
    elif suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(out)
        vectors, ids = np.array(table["vector"].to_pylist(), dtype), np.array(table["id"])
    else:
        with open_vectors(out) as source:
            vectors = source.take(np.arange(source.count))
        ids = np.load(f"{out}.ids.npy")
    expected = np.array([row for row in range(len(VECTORS)) if row % 7])
    order = np.argsort(ids)
    np.testing.assert_array_equal(ids[order], 3 * expected)
    np.testing.assert_array_equal(vectors[order], (VECTORS * 30).astype(dtype)[expected])
    assert {file.name for file in tmp_path.iterdir()} <= {"index", out.name, f"{out.name}.ids.npy"}
    assert run("export", tmp_path / "index", out).exit_code == 1


def test_strings_and_fields_go_into_parquet_and_come_back(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    build(tmp_path / "index", strings=True)
    assert run("export", tmp_path / "index", tmp_path / "out.parquet").exit_code == 0
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [*rows[0]] == ["id", "vector", "price", "year", "id_", "on", "day", "title", "more"]
    for row in rows:
        number = row["year"]
        assert row["id"] == f"Straße {number}\u2028"
        assert row["id_"] == f"n{number}"
        assert row["price"] == (number / 8 if number % 5 else None)
        assert row["on"] == (number % 2 == 0)
        assert row["day"].timestamp() == 86_400 * number
        assert row["title"] == (None if number == 3 else f"title {number}")
        assert json.loads(row["more"]) == {"a": number}
    assert run("export", tmp_path / "index", tmp_path / "few.parquet", "--fields", "title, on").exit_code == 0
    assert parquet.read_schema(tmp_path / "few.parquet").names == ["id", "vector", "title", "on"]
    result = run("export", tmp_path / "index", tmp_path / "x.parquet", "--fields", "author")
    assert (result.exit_code, (tmp_path / "x.parquet").exists()) == (2, False)
    assert "'author'" in result.stderr
    assert run("export", tmp_path / "index", tmp_path / "out.npz").exit_code == 2

    options = ["--ids", tmp_path / "out.npy.ids.txt", "--string-ids", "--dram", "4MiB"]
    assert run("export", tmp_path / "index", tmp_path / "out.npy").exit_code == 0
    assert run("build", tmp_path / "again", tmp_path / "out.npy", *options).exit_code == 0
    with ZoomIndex.open(tmp_path / "index") as one, ZoomIndex.open(tmp_path / "again") as other:
        found, again = (each.search(QUERIES, 5, recall=1.0).ids for each in (one, other))
        np.testing.assert_array_equal(found, again)


def test_documents_of_two_kinds_are_refused_where_a_column_has_one_and_leave_nothing(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for number, raw in enumerate(([b"x"] * 19 + ["text"], ["text"] * 19 + [b"x"], [{"a": 1}] * 10 + [b"x"] * 10)):
        index = tmp_path / f"index{number}"
        ZoomIndex.build(index, VECTORS[:20], documents={"raw": raw}, dram="2MiB").close()
        result = run("export", index, tmp_path / "out.parquet")
        assert result.exit_code == 2
        assert "document 'raw' holds bytes and other values: use .jsonl" in result.stderr
        assert {file.name for file in tmp_path.iterdir()} == {f"index{each}" for each in range(number + 1)}


def test_bytes_datetimes_and_half_surrogates_are_exported(tmp_path: Path) -> None:
    raw = [None, b"\xff\x00", *([b""] * 18)]
    text = ["\ud800 half", 'a "quote"\n', *map(str, range(18))]
    days = np.array(["2024-01-31T12:30", "NaT", *["1969-01-01"] * 18], "datetime64[us]")
    documents = {"raw": raw, "text": text, "distance": [[1, None]] * 20}
    attributes = {"day": days, "price": [None, *map(float, range(19))], "n": [None, *range(19)]}
    index = tmp_path / "index"
    ZoomIndex.build(index, VECTORS[:20], documents=documents, attributes=attributes, dram="2MiB").close()
    assert run("export", index, tmp_path / "out.jsonl").exit_code == 0
    rows = {row["id"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().split("\n")[:-1])}
    for number in range(20):
        row = rows[number]
        assert row["vector"] == VECTORS[number].tolist()
        assert row["raw"] == (None if number == 0 else {"base64": "/wA=" if number == 1 else ""})
        assert (row["text"], row["distance"]) == (text[number], [1, None])
        assert row["day"] == {0: "2024-01-31T12:30:00", 1: None}.get(number, "1969-01-01T00:00:00")
        assert (row["price"], row["n"]) == (attributes["price"][number], attributes["n"][number])
    parquet = pytest.importorskip("pyarrow.parquet")
    assert run("export", index, tmp_path / "out.parquet", "--fields", "raw,day,raw").exit_code == 0
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["id", "vector", "raw", "day"]
    assert [row["raw"] for row in sorted(table.to_pylist(), key=lambda row: row["id"])] == raw
    result = run("export", index, tmp_path / "half.parquet")
    assert (result.exit_code, (tmp_path / "half.parquet").exists()) == (2, False)
    assert "'text' holds text that is no Unicode: use .jsonl" in result.stderr


def test_neighbours_are_written_with_their_fields(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    build(tmp_path / "index")
    write_vectors(tmp_path / "q.fvecs", QUERIES)
    options = ["-k", 4, "--where", "year > 30", "--fields", "all", "--show", 2]
    with ZoomIndex.open(tmp_path / "index") as index:
        expected = index.search(QUERIES, 4, where="year > 30", fields=True)
        ids, distances = index.search(QUERIES, 4).ids, index.search(QUERIES, 4).distances
    for suffix in (".jsonl", ".parquet"):
        out = tmp_path / f"out{suffix}"
        result = run("search", tmp_path / "index", tmp_path / "q.fvecs", *options, "--out", out, "--json", "-")
        assert result.exit_code == 0, result.output
        assert len(json.loads(result.stdout)["neighbours"]) == 2
        if suffix == ".parquet":
            rows = parquet.read_table(out).to_pylist()
        else:
            rows = [json.loads(line) for line in out.read_text().split("\n")[:-1]]
        wanted = expected.to_arrow().to_pylist()
        assert [*rows[0]] == [*wanted[0]]
        for row, want in zip(rows, wanted, strict=True):
            more = row.pop("more")
            assert (more if suffix == ".parquet" else json.dumps(more)) == want.pop("more")
            assert str(row.pop("day")).replace("T", " ") == str(want.pop("day"))
            assert row == want
    assert run("search", tmp_path / "index", tmp_path / "q.fvecs", "-k", 4, "--out", tmp_path / "o.npz").exit_code == 0
    with np.load(tmp_path / "o.npz") as arrays:
        np.testing.assert_array_equal(arrays["ids"], ids)
        np.testing.assert_array_equal(arrays["distances"], distances)
    for suffix, fields in ((".npz", "title"), (".npy", "title"), (".parquet", "author")):
        out = tmp_path / f"x{suffix}"
        result = run("search", tmp_path / "index", tmp_path / "q.fvecs", "--out", out, "--fields", fields)
        assert (result.exit_code, out.exists()) == (2, False)
        assert "--fields" in result.stderr


def test_an_empty_index_is_exported_where_a_file_may_be_empty(tmp_path: Path) -> None:
    ZoomIndex.build(tmp_path / "index", np.empty((0, 4), np.float32), grow_to=100, dram="4MiB").close()
    assert run("export", tmp_path / "index", tmp_path / "out.npz").exit_code == 0
    with np.load(tmp_path / "out.npz") as arrays:
        assert (arrays["vectors"].shape, arrays["ids"].shape) == ((0, 4), (0,))
    assert run("export", tmp_path / "index", tmp_path / "out.npy").exit_code == 2
    assert {file.name for file in tmp_path.iterdir()} == {"index", "out.npz"}


def test_a_search_prints_neighbours_with_their_fields(tmp_path: Path) -> None:
    build(tmp_path / "index")
    write_vectors(tmp_path / "q.fvecs", QUERIES)
    options = ["-k", 4, "--show", 3, "--fields", "title,on", "--where", "year > 30"]
    told = run("search", tmp_path / "index", tmp_path / "q.fvecs", *options, "--json", "-")
    assert told.exit_code == 0, told.output
    with ZoomIndex.open(tmp_path / "index") as index:
        expected = index.search(QUERIES[:3], 4, where="year > 30", fields=["title", "on"]).rows()
    assert json.loads(told.stdout)["neighbours"] == expected
    told = run("search", tmp_path / "index", tmp_path / "q.fvecs", *options)
    for row in (row for rows in expected for row in rows):
        assert any(f" {row['id']} " in line and f" {row['title']} " in line for line in told.stdout.splitlines())
    assert "97 more queries" in told.stdout
    assert "neighbours" not in run("search", tmp_path / "index", tmp_path / "q.fvecs", "--show", 0).stdout


def test_limits_reach_the_search(tmp_path: Path) -> None:
    build(tmp_path / "index")
    write_vectors(tmp_path / "q.fvecs", QUERIES)
    for limit in (["--max-reads", 1], ["--deadline-ms", 1e-6]):
        told = run("search", tmp_path / "index", tmp_path / "q.fvecs", *limit, "--json", "-")
        assert json.loads(told.stdout)["stopped_early"] > 0


def test_a_tuned_index_is_that_of_the_library(tmp_path: Path) -> None:
    build(tmp_path / "index")
    write_vectors(tmp_path / "q.fvecs", QUERIES)
    told = run("tune", tmp_path / "index", tmp_path / "q.fvecs", "--json", "-")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["queries"] == 100
    build(tmp_path / "other")
    with ZoomIndex.open(tmp_path / "other", writable=True) as other, ZoomIndex.open(tmp_path / "index") as index:
        other.tune(QUERIES)
        for name in ("nprobe", "calibrated_recall"):
            assert index.stats()[name] == other.stats()[name]
    write_vectors(tmp_path / "few.fvecs", QUERIES[:63])
    assert run("tune", tmp_path / "index", tmp_path / "few.fvecs").exit_code == 2


def test_lists_are_exported(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    day = datetime.datetime(2024, 1, 31)
    attributes: dict[str, list[Any]] = {
        "tags": [["a"], [], None, ["b", "c"]], "days": [[day], [], None, []], "n": [[1], [2**62], [], None],
        "f": [[0.5], [], [], None], "b": [[True, False], [], None, []],
    }  # fmt: skip
    ZoomIndex.build(tmp_path / "index", np.eye(4, dtype="f4"), attributes=attributes, dram="2MiB").close()
    assert run("export", tmp_path / "index", tmp_path / "out.parquet").exit_code == 0
    rows = sorted(parquet.read_table(tmp_path / "out.parquet").to_pylist(), key=lambda row: row["id"])
    assert {name: [row[name] for row in rows] for name in attributes} == attributes

"""``memhier index build`` and ``add`` with documents and attributes from Parquet and JSON Lines."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memhier.ann import ZoomIndex
from memhier.ann.files import write_vectors
from memhier.benchmarks.cli.main import main

VECTORS = np.random.default_rng(0).normal(size=(1500, 6)).astype(np.float32)
ROWS = [
    {
        "title": f"Straße {row}\u2028",
        "more": {"a": [row, None]},
        "tags": ["x"] * (row % 3),
        "price": None if row % 4 == 0 else row / 2,
        "lang": "de" if row % 2 else "en",
    }
    for row in range(1500)
]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["index", *map(str, arguments)])


def write_rows(path: Path, start: int, stop: int) -> Path:
    """Write rows as the suffix says; a Parquet file has a column of vectors as well."""
    rows = ROWS[start:stop]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
        return path
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {name: [row[name] for row in rows] for name in rows[0]} | {"v": list(VECTORS[start:stop])}
    parquet.write_table(arrow.table(columns), path, row_group_size=400)
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_vectors(tmp_path / "x.fvecs", VECTORS[:900])
    write_vectors(tmp_path / "more.fvecs", VECTORS[900:])
    write_vectors(tmp_path / "few.fvecs", VECTORS[:3])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_documents_and_attributes_come_back(place: Path, suffix: str) -> None:
    file, more = write_rows(place / f"a.{suffix}", 0, 900), write_rows(place / f"b.{suffix}", 900, 1500)
    result = run("build", "index", "x.fvecs", "--documents", f"{file}:title,more, tags", "--attributes",
                 f"{file}:price,lang", "--dram", "4MiB")  # fmt: skip
    assert result.exit_code == 0, result.output
    result = run("add", "index", "more.fvecs", "--documents", f"{more}:title,more,tags", "--attributes",
                 f"{more}:price,lang")  # fmt: skip
    assert result.exit_code == 0, result.output
    with ZoomIndex.open("index") as index:
        assert index.fields == {"price": "float64", "lang": "str"} | dict.fromkeys(
            ["title", "more", "tags"], "document"
        )
        found = index.fetch(np.arange(1500), ["title", "more", "tags"])
        assert [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)] == [
            {name: row[name] for name in found} for row in ROWS
        ]
        cheap = index.search(VECTORS[0], 1500, where="price < 20 and lang == 'de'", recall=1).ids
        assert {*cheap.tolist()} - {-1} == {row for row in range(40) if row % 4 and row % 2}


def test_without_names_all_columns_but_vectors_are_taken(place: Path) -> None:
    table = write_rows(place / "a.parquet", 0, 900)
    assert run("build", "p", table, "--documents", table, "--dram", "4MiB").exit_code == 0
    write_rows(place / "a.jsonl", 0, 900)
    assert run("build", "j", "x.fvecs", "--documents", "a.jsonl", "--dram", "4MiB").exit_code == 0
    for name in "pj":
        with ZoomIndex.open(name) as index:
            assert {*index.fields} == {*ROWS[0]}
            assert index.search(VECTORS[7], 1, fields=True).rows()[0].items() >= ROWS[7].items()


def test_a_file_may_have_a_colon_in_its_name(place: Path) -> None:
    write_rows(place / "a:b.jsonl", 0, 900)
    assert run("build", "i", "x.fvecs", "--documents", "a:b.jsonl", "--dram", "4MiB").exit_code == 0
    assert run("build", "j", "x.fvecs", "--documents", "a:b.jsonl:title", "--dram", "4MiB").exit_code == 0
    with ZoomIndex.open("j") as index:
        assert {*index.fields} == {"title"}


GOOD = '{"a": 1}\n'
BAD = [
    ("none.jsonl", None, 2, "none.jsonl"),
    ("a.csv", "a\n", 2, "expected a file ending in .parquet or .jsonl"),
    ("a.jsonl:", GOOD * 3, 2, "expected names behind the colon"),
    ("a.jsonl:b", GOOD * 3, 2, "no line has the name 'b': expected some of a"),
    ("a.jsonl", GOOD * 2, 2, "one for each"),
    ("a.jsonl", GOOD * 4, 2, "one for each"),
    ("a.jsonl", GOOD * 2 + "\n", 1, "a.jsonl: line 3"),
    ("a.jsonl", GOOD + '{"a": \n{"a": 1}\n', 1, "a.jsonl: line 2"),
    ("a.jsonl", GOOD * 2 + "[1]\n", 1, "line 3 is '[1]', expected {\"name\": value}"),
    ("a.jsonl", GOOD * 2 + '{"a": "\xe9"}\n', 1, "a.jsonl: "),
    ("a.parquet", "no table", 1, "a.parquet"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("given", "text", "code", "words"), BAD)
@pytest.mark.parametrize("command", ["build", "add"])
@pytest.mark.parametrize("option", ["--documents", "--attributes"])
def test_files_that_do_not_fit_change_nothing(
    place: Path, given: str, text: str | None, code: int, words: str, command: str, option: str
) -> None:
    pytest.importorskip("pyarrow")
    if text is not None:
        (place / given.partition(":")[0]).write_text(text, "latin-1")
    if command == "add":
        assert run("build", "index", "x.fvecs", "--dram", "4MiB").exit_code == 0
    result = run(command, "index", "few.fvecs", option, given)
    assert result.exit_code == code, result.output
    assert (result.stderr.startswith("Error: "), result.stderr.count("\n")) == (True, 1)
    assert words in result.stderr
    if command == "add":
        with ZoomIndex.open("index") as index:
            assert (len(index), index.fields) == (900, {})
    else:
        assert not (place / "index").exists()


def test_a_column_that_is_not_there_is_told_the_others(place: Path) -> None:
    table = write_rows(place / "a.parquet", 0, 900)
    for option in ("--documents", "--attributes"):
        result = run("build", "index", table, option, f"{table}:titel")
        assert result.exit_code == 2
        assert "no column 'titel': expected some of title, more, tags, price, lang, v" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_documents_are_never_held_whole(place: Path, suffix: str) -> None:
    """Documents of 80 MB, of which a command holds a part."""
    write_vectors(place / "v.fvecs", np.random.default_rng(0).normal(size=(10_000, 4)).astype(np.float32))
    texts = (f"{row:08}" * 1000 for row in range(10_000))
    if suffix == "jsonl":
        with open("d.jsonl", "w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        with parquet.ParquetWriter("d.parquet", arrow.schema([("text", arrow.string())]), compression="none") as writer:
            for _ in range(10):
                writer.write_table(arrow.table({"text": [next(texts) for _ in range(1000)]}))
    code = (
        "import sys\n"
        "from memhier.benchmarks.cli.main import main\n"
        "from memhier.ann import ZoomIndex\n"
        "import faiss, tqdm, pyarrow.parquet\n"
        "peak = lambda: int(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]) << 10\n"
        "before = peak()\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(peak() - before, file=sys.stderr)\n"
    )

    def grown(*arguments: str) -> int:
        command = [sys.executable, "-c", code, "index", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return int(done.stderr.split()[-1])

    options = ["--dram", "16MiB", "--grow-to", "40000"]
    idle = grown("build", "plain", "v.fvecs", *options)
    for arguments in (
        ["build", "index", "v.fvecs", "--documents", f"d.{suffix}", *options],
        ["add", "plain", "v.fvecs", "--documents", f"d.{suffix}"],
        ["export", "index", f"out.{suffix}"],
        ["search", "index", "v.fvecs", "--fields", "text", "--out", f"found.{suffix}", "-k", "1"],
    ):
        assert grown(*arguments) - idle < 75e6, arguments


def test_attributes_are_all_columns_that_can_be_filtered_and_the_rest_is_told(place: Path) -> None:
    file = write_rows(place / "a.parquet", 0, 900)
    result = run("build", "index", "x.fvecs", "--attributes", file, "--dram", "4MiB")
    assert result.exit_code == 0, result.output
    assert "attributes leave out more, v, of lists of numbers or nested values" in result.stderr
    with ZoomIndex.open(place / "index") as index:
        assert index.fields == {"title": "str", "tags": "list[str]", "price": "float64", "lang": "str"}
        assert index.search(VECTORS[5], 5, where="tags contains 'x'").ids[0] == 5
    assert "leave out" not in run("add", "index", "more.fvecs", "--attributes",
                                  f"{write_rows(place / 'b.parquet', 900, 1500)}:tags").stderr  # fmt: skip

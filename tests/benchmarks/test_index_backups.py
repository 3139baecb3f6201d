"""``memhier index push``, ``pull``, ``backups``, ``prune``, and reading from a URL."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memhier.ann import ZoomIndex
from memhier.ann.files import write_vectors
from memhier.benchmarks.cli.main import main

pytest.importorskip("fsspec", reason="URLs need the extra remote")
VECTORS = np.random.default_rng(0).normal(size=(700, 6)).astype(np.float32)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["index", *map(str, arguments)])


def figures(*arguments: object) -> dict:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_vectors(tmp_path / "q.fvecs", VECTORS[:50])
    (tmp_path / "gone.txt").write_text("1\n2\n")
    documents = {"title": [f"t{row}" for row in range(700)]}
    ZoomIndex.build(tmp_path / "index", VECTORS, documents=documents, dram="2MiB").close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_backup_is_listed_read_checked_pruned_and_restored(place: Path) -> None:
    url = (place / "far").as_uri()
    first = figures("push", "index", url)
    assert first["moved_bytes"] == first["nbytes"] > 0
    assert run("remove", "index", "gone.txt").exit_code == 0
    assert 0 < figures("push", "index", url)["moved_bytes"] < first["nbytes"]
    assert [each["generation"] for each in figures("backups", url)] == [1, 2]
    assert run("backups", url).output.count("zoom") == 2

    options = ["--cache", place / "cache", "--cache-bytes", "32MiB"]
    for arguments in (["info"], ["search", "q.fvecs", "--fields", "title", "--out", "far.jsonl"]):
        there = run(arguments[0], url, *arguments[1:], *options)
        assert there.exit_code == 0, there.output
    assert run("search", "index", "q.fvecs", "--fields", "title", "--out", "near.jsonl").exit_code == 0
    assert (place / "far.jsonl").read_text() == (place / "near.jsonl").read_text()
    assert run("export", url, "far.npz", *options).exit_code == 0
    with np.load("far.npz") as arrays:
        assert sorted(arrays["ids"]) == [0, *range(3, 700)]
    assert (place / "cache").exists()
    assert not (place / "cache-home").exists()
    assert "2 generations, no problem found" in run("check", url).output

    assert ", 1 generation left" in run("prune", url, "--keep", 1).output
    assert figures("pull", url, "again")["generation"] == 2
    with ZoomIndex.open("again") as again, ZoomIndex.open("index") as index:
        np.testing.assert_array_equal(again.search(VECTORS, 3).ids, index.search(VECTORS, 3).ids)


@pytest.mark.long
def test_a_damaged_backup_is_told(place: Path) -> None:
    url = (place / "far").as_uri()
    figures("push", "index", url)
    largest = max((file for file in (place / "far").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))
    result = run("check", url)
    assert result.exit_code == 1
    assert "1 problem found" in result.stderr
    assert "push with verify" in result.output
    assert run("pull", url, "again").exit_code == 1
    assert run("info", "again").exit_code == 1
    assert figures("push", "index", url)["moved_bytes"] == 0
    assert figures("push", "index", url, "--verify")["moved_bytes"] == largest.stat().st_size
    assert "1 generation, no problem found" in run("check", url).output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["push", "index", "far"], 2, "'far': expected a URL such as"),
        (["pull", "index", "again"], 2, "'index': expected a URL such as"),
        (["backups", "index"], 2, "expected a URL"),
        (["push", "index", "nothing://x"], 2, "nothing"),
        (["push", "index", "://x"], 2, "'://x': expected a URL such as"),
        (["push", "index", "s3:/x"], 2, "'s3:/x': expected a URL such as"),
        (["search", "index", "q.fvecs", "--out", "no/dir/x.npz"], 2, "no/dir/x.npz: its folder does not exist"),
        (["search", "index", "q.fvecs", "--out", "no/x.jsonl"], 2, "no/x.jsonl: its folder does not exist"),
        (["search", "index", "q.fvecs", "--out", "no/x.ivecs"], 2, "no/x.ivecs: its folder does not exist"),
        (["export", "index", "no/x.parquet"], 2, "no/x.parquet: its folder does not exist"),
        (["push", "none", "memory://x"], 2, "none"),
        (["push", "index", "memory://x", "--keep", "0"], 2, "--keep"),
        (["pull", "memory://none", "again"], 1, "memory://none"),
        (["backups", "memory://none"], 1, "memory://none: there is no backup"),
        (["prune", "memory://none", "--keep", "1"], 1, "there is no backup"),
        (["prune", "memory://none"], 2, "--keep"),
        (["check", "memory://none"], 1, "there is no backup"),
        (["info", "memory://none"], 1, "memory://none"),
        (["info", "nothing://x"], 2, "nothing"),
        (["search", "memory://none", "q.fvecs"], 1, "memory://none"),
        (["search", "memory://none", "q.fvecs", "--cache-bytes", "lots"], 2, "cache_bytes='lots'"),
        (["add", "memory://none", "q.fvecs"], 2, "memory://none is a backup, which is only read"),
        (["remove", "memory://none", "gone.txt"], 2, "which is only read"),
        (["tune", "memory://none", "q.fvecs"], 2, "which is only read"),
        (["compact", "memory://none"], 2, "which is only read"),
        (["search", "index", "memory://q.fvecs"], 2, "only Parquet files"),
        (["search", "index", "memory://q.parquet"], 1, "q.parquet"),
        (["add", "index", "memory://q.parquet", "--id-column", "x"], 1, "q.parquet"),
    ],
)
def test_wrong_places_end_with_a_line(place: Path, arguments: list[str], code: int, words: str) -> None:
    before = sorted(place.iterdir())
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert (result.stderr.startswith("Error: "), result.stderr.count("\n")) == (True, 1)
    assert words in result.stderr
    assert sorted(place.iterdir()) == before

"""``memhier index``: its builds, answers, output and errors."""

import json
import os
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memhier.ann import SearchResult, ZoomIndex
from memhier.ann.files import open_vectors, write_vectors
from memhier.benchmarks.cli.main import main
from memhier.benchmarks.exact import exact_neighbours

VECTORS = np.random.default_rng(0).normal(size=(2500, 12)).astype(np.float32)
QUERIES = np.random.default_rng(1).normal(size=(1100, 12)).astype(np.float32)
TRUE = exact_neighbours(VECTORS, QUERIES, 20)[0]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["index", *map(str, arguments)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vectors, queries, their true neighbours, and an index."""
    folder = tmp_path_factory.mktemp("index-command")
    write_vectors(folder / "x.fvecs", VECTORS)
    write_vectors(folder / "q.fbin", QUERIES)
    write_vectors(folder / "t.ivecs", TRUE)
    result = run("build", folder / "index", folder / "x.fvecs", "--dram", "2MiB", "--seed", 3)
    assert result.exit_code == 0, result.output
    assert "2,500" in result.stdout
    assert result.stderr == ""
    return folder


def test_a_build_is_that_of_the_library(place: Path, tmp_path: Path) -> None:
    with (
        ZoomIndex.build(tmp_path / "index", VECTORS, dram="2MiB", seed=3) as expected,
        ZoomIndex.open(place / "index") as built,
    ):
        apart = {"memory_bytes": 0, "planned_bytes": 0}  # which count the paths
        assert built.stats() | apart == expected.stats() | apart
        np.testing.assert_array_equal(built.search(QUERIES, 5).ids, expected.search(QUERIES, 5).ids)


def test_options_reach_the_build(place: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("\n".join(str(7 * row) for row in range(2500)))
    np.save(tmp_path / "ids.npy", 7 * np.arange(2500))
    for suffix in ("txt", "npy"):
        index = tmp_path / suffix
        options = ["--ids", tmp_path / f"ids.{suffix}", "--metric", "cosine", "--dram", "3MiB", "--seed", 4]
        result = run("build", index, place / "x.fvecs", "--json", tmp_path / "figures.json", *options)
        assert result.exit_code == 0, result.output
        figures = json.loads((tmp_path / "figures.json").read_text())
        assert (figures["metric"], figures["dram"], figures["vectors"]) == ("cosine", 3 << 20, 2500)
        assert figures["seconds"] > 0
        with ZoomIndex.open(index) as opened:
            assert opened.search(VECTORS[11], 1).ids.tolist() == [77]


def test_keys_and_columns_choose_within_a_file(place: Path, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="HDF5 needs the extra hdf5")
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["train"], file["test"], file["neighbors"], file["distances"] = VECTORS, QUERIES, TRUE, TRUE * 0.5
        file["other"] = VECTORS[:300]
    assert run("build", tmp_path / "a", tmp_path / "x.hdf5", "--key", "other", "--dram", "2MiB").exit_code == 0
    with ZoomIndex.open(tmp_path / "a") as opened:
        assert len(opened) == 300
    assert run("build", tmp_path / "b", tmp_path / "x.hdf5", "--dram", "2MiB").exit_code == 0
    result = run("search", tmp_path / "b", tmp_path / "x.hdf5", "--truth", tmp_path / "x.hdf5", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["queries"] == 1100
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra parquet")
    from pyarrow import parquet

    table = arrow.table({"a": VECTORS[:200].tolist(), "b": VECTORS[300:500].tolist()})
    parquet.write_table(table, tmp_path / "x.parquet")
    assert run("build", tmp_path / "c", tmp_path / "x.parquet", "--column", "b", "--dram", "2MiB").exit_code == 0
    with ZoomIndex.open(tmp_path / "c") as opened:
        assert opened.search(VECTORS[300], 1).distances == 0
    result = run("search", tmp_path / "c", tmp_path / "x.parquet", "--column", "a", "--json", "-")
    assert json.loads(result.stdout)["queries"] == 200


def test_a_search_writes_what_the_library_finds_and_measures_recall(place: Path, tmp_path: Path) -> None:
    with ZoomIndex.open(place / "index") as opened:
        found = opened.search(QUERIES, 12).ids
    hits = sum(len(np.intersect1d(a, b)) for a, b in zip(found, TRUE[:, :12], strict=True))
    for suffix in (".ivecs", ".npy"):
        out = tmp_path / f"found{suffix}"
        result = run("search", place / "index", place / "q.fbin", "-k", 12, "--truth", place / "t.ivecs", "--out", out,
                     "--json", tmp_path / "figures.json")  # fmt: skip
        assert result.exit_code == 0, result.output
        with open_vectors(out) as written:
            np.testing.assert_array_equal(written.take(np.arange(1100)), found)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["recall@12"] == pytest.approx(hits / (12 * 1100))
    assert 0.9 < figures["recall@12"] < 1
    assert figures["queries"] == 1100
    assert figures["queries_per_second"] == pytest.approx(1100 / figures["seconds"])
    assert figures["pages_per_query"] >= figures["reads_per_query"] > 0
    assert f"{figures['recall@12']:.4f}" in result.stdout


def test_neighbours_that_the_truth_does_not_have_are_not_missed(place: Path, tmp_path: Path) -> None:
    true = TRUE[:, :10].copy()
    true[0, 4:] = -1
    write_vectors(tmp_path / "t.ivecs", true)
    result = run("search", place / "index", place / "q.fbin", "--truth", tmp_path / "t.ivecs", "--json", "-")
    with ZoomIndex.open(place / "index") as opened:
        found = opened.search(QUERIES, 10).ids
    hits = sum(len(np.intersect1d(a, b)) for a, b in zip(found, true, strict=True))
    assert json.loads(result.stdout)["recall@10"] == pytest.approx(hits / (10 * 1100 - 6))


def test_places_left_empty_are_no_hits(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_vectors(tmp_path / "t.ivecs", np.where(np.arange(10) < 5, TRUE[:, :10], -1))
    nothing = np.full((1100, 10), -1)

    def search(_: ZoomIndex, queries: np.ndarray, k: int) -> SearchResult:
        return SearchResult(
            nothing[: len(queries)], nothing[: len(queries)] * 0.5, {"reads": 0, "pages": 0, "stopped_early": 0}
        )

    monkeypatch.setattr(ZoomIndex, "search", search)
    result = run("search", place / "index", place / "q.fbin", "--truth", tmp_path / "t.ivecs", "--json", "-")
    assert json.loads(result.stdout)["recall@10"] == 0


def test_info_tells_the_figures_of_the_index(place: Path) -> None:
    with ZoomIndex.open(place / "index") as opened:
        stats = opened.stats()
    result = run("info", place / "index", "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == stats
    result = run("info", place / "index")
    assert result.exit_code == 0
    for words in (str(place / "index").replace("\n", ""), "2,500", "float32", "2.0 MiB"):
        assert words in result.stdout.replace("\n", "")


def test_check_finds_damage(place: Path, tmp_path: Path) -> None:
    result = run("check", place / "index")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "2,500 vectors, no problem found" in result.stdout
    result = run("build", tmp_path / "index", place / "x.fvecs", "--dram", "2MiB")
    assert result.exit_code == 0
    (segment,) = (tmp_path / "index" / "segments").glob("p0-rows.*")
    with segment.open("r+b") as file:
        file.seek(10_000)
        file.write(b"damage")
    result = run("check", tmp_path / "index")
    assert result.exit_code == 1
    assert "p0-rows" in result.stdout
    assert result.stderr == f"Error: {tmp_path / 'index'}: 1 problem found\n"


BAD = [
    (["build", "new", "x.fvecs", "--dram", "lots"], 2, "dram='lots'"),
    (["build", "new", "x.fvecs", "--dram", "1KiB"], 2, "at least"),
    (["build", "new", "x.fvecs", "--metric", "l3"], 2, "'l3' is not one of"),
    (["build", "new", "x.fvecs", "--seed", "-1"], 2, "--seed"),
    (["build", "new", "x.fvecs", "--key", "train"], 2, "key='train'"),
    (["build", "new", "x.fvecs", "--ids", "words.txt"], 2, "line 2 is 'two', expected an integer"),
    (["build", "new", "x.fvecs", "--ids", "few.txt"], 2, "ids has 1 entry for 2,500"),
    (["build", "new", "x.fvecs", "--json", "none/figures.json"], 2, "its folder does not exist"),
    (["build", "new", "words.txt"], 2, "'.txt' is not one of"),
    (["build", "new", "none.fvecs"], 2, "none.fvecs"),
    (["build", "new", "nan.fbin"], 2, "row 0 holds NaN"),
    (["build", "new"], 2, "Missing argument 'VECTORS'. See main index build --help."),
    (["build", "index", "x.fvecs"], 1, "index"),
    (["build", "none/new", "x.fvecs"], 1, "none"),
    (["build", "new", "cut.fvecs"], 1, "cut short"),
    (["search", "index", "q.fbin", "-k", "0"], 2, "-k"),
    (["search", "index", "q.fbin", "-k", "21", "--truth", "t.ivecs"], 2, "20 neighbours of 1,100 queries, expected at"),
    (["search", "index", "x.fvecs", "--truth", "t.ivecs"], 2, "expected at least 10 of 2,500"),
    (["search", "index", "q.fbin", "--truth", "x.fvecs"], 2, "expected ground truth"),
    (["search", "index", "q.fbin", "--truth", "words.txt"], 1, "words.txt"),
    (["search", "index", "q.fbin", "--out", "new.fvecs"], 2, "--out new.fvecs: expected a file ending in .parquet"),
    (["search", "index", "q.fbin", "--out", "t.ivecs"], 1, "exists already"),
    (["search", "index", "nan.fbin"], 2, "dimension of the index"),
    (["search", "none", "q.fbin"], 2, "none"),
    (["search", "empty", "q.fbin"], 1, "empty"),
    (["info", "empty"], 1, "empty"),
    (["check", "empty"], 1, "empty"),
    (["check"], 2, "Missing argument 'PATH'"),
    (["find"], 2, "No such command 'find'. See main index --help."),
    (["--loud"], 2, "--loud"),
]


def test_text_of_an_index_does_not_steer_the_terminal(tmp_path: Path) -> None:
    titles, ids = ["a\x1b[31m\nb\tc", "\x9b2J", "d\x00e"], ["\x1b]0;x", "y", "z"]
    ZoomIndex.build(tmp_path / "x", VECTORS[:3], ids=ids, documents={"title\x1b": titles}, dram="2MiB").close()
    write_vectors(tmp_path / "q.npy", VECTORS[:3])
    shown = run("search", tmp_path / "x", tmp_path / "q.npy", "-k", 1, "--fields", "all").stdout
    assert not {character for character in shown if ord(character) < 32 or 127 <= ord(character) < 160} - {"\n"}
    assert all(text in shown for text in ("a\\x1b[31m", "\\x9b2J", "d\\x00e", "\\x1b]0;x", "title\\x1b"))


@pytest.mark.parametrize(("arguments", "code", "words"), BAD)
def test_errors_take_one_line(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    for file in ("x.fvecs", "q.fbin", "t.ivecs", "index"):
        (tmp_path / file).symlink_to(place / file)
    (tmp_path / "words.txt").write_text("1\ntwo\n")
    (tmp_path / "few.txt").write_text("1\n")
    (tmp_path / "empty").mkdir()
    write_vectors(tmp_path / "nan.fbin", [[[np.nan, 1.0]]])
    (tmp_path / "cut.fvecs").write_bytes((place / "x.fvecs").read_bytes()[:-1])
    before = sorted(os.listdir(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert words in result.stderr
    assert result.stdout == ""
    assert sorted(os.listdir(tmp_path)) == before


def test_a_warning_of_the_library_is_a_note(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = ZoomIndex.search

    def search(self: ZoomIndex, queries: np.ndarray, k: int) -> SearchResult:
        warnings.warn("the sky is clouded", stacklevel=2)
        return inner(self, queries, k)

    monkeypatch.setattr(ZoomIndex, "search", search)
    result = run("search", place / "index", place / "q.fbin")
    assert result.exit_code == 0, result.output
    assert result.stderr == "note: the sky is clouded\n"


def test_a_terminated_build_ends_by_an_exception_and_puts_the_handler_back(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []

    def build(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            cleaned.append(True)

    monkeypatch.setattr(ZoomIndex, "build", build)
    result = run("build", tmp_path / "index", place / "x.fvecs")
    assert result.exit_code == 128 + signal.SIGTERM
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) is before

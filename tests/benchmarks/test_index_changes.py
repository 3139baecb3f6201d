"""``memhier index add``, ``remove``, ``compact`` and ``search --where``: the changes they make, and no others."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memhier.ann import ZoomIndex
from memhier.ann.files import write_vectors
from memhier.benchmarks.cli.main import main

VECTORS = np.random.default_rng(0).normal(size=(600, 12)).astype(np.float32)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["index", *map(str, arguments)])


def figures(*arguments: object) -> dict:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def write_table(path: Path, price: list) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lists = [[1.0, 2.0]] * len(price)
    parquet.write_table(arrow.table({"price": price, "v": lists}), path)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_vectors(tmp_path / "x.fvecs", VECTORS[:400])
    write_vectors(tmp_path / "more.fbin", VECTORS[400:])
    table = write_table(tmp_path / "x.parquet", list(range(400)))
    found = figures("build", tmp_path / "index", tmp_path / "x.fvecs", "--dram", "2MiB", "--attributes", table)
    assert found["vectors"] == 400
    return tmp_path


def test_what_is_added_and_removed_is_what_the_library_says(place: Path) -> None:
    np.save(place / "ids.npy", np.arange(5000, 5200))
    table = write_table(place / "more.parquet", [None, *range(-1, -200, -1)])
    found = figures("add", place / "index", place / "more.fbin", "--ids", place / "ids.npy", "--attributes", table)
    assert (found["added"], found["vectors"]) == (200, 600)
    (place / "gone.txt").write_text("5001\n7\n")
    found = figures("remove", place / "index", place / "gone.txt")
    assert (found["removed"], found["vectors"]) == (2, 598)
    with ZoomIndex.open(place / "index") as index:
        np.testing.assert_array_equal(index.reconstruct(np.arange(5002, 5200)), VECTORS[402:])
        kept = index.search(VECTORS[0], 300, where="price < 0", recall=1.0).ids
        assert sorted(kept[kept >= 0]) == list(range(5002, 5200))
        with pytest.raises(KeyError):
            index.reconstruct([7])
    found = figures("update", place / "index", "--where", "price <= -198", "--set", '{"price": 7000}')
    assert (found["updated"], found["vectors"]) == (2, 598)
    with ZoomIndex.open(place / "index") as index:
        assert sorted(np.concatenate([*index.ids("price == 7000")]).tolist()) == [5198, 5199]
    found = figures("update", place / "index", "--where", "price == 7000", "--set", '{"price": -150}')
    found = figures("remove", place / "index", "--where", "price < -100")
    assert (found["removed"], found["vectors"]) == (99, 499)
    found = figures("compact", place / "index")
    assert (found["parts"], found["vectors"]) == (1, 499)
    assert run("check", place / "index").exit_code == 0


def test_ids_go_on_where_none_are_given(place: Path) -> None:
    figures("add", place / "index", place / "more.fbin")
    with ZoomIndex.open(place / "index") as index:
        np.testing.assert_array_equal(index.reconstruct(np.arange(600)), VECTORS)


@pytest.mark.parametrize("where", ["price >= 395", "price >= 395 and not price != price"])
def test_a_search_is_filtered_and_as_exact_as_asked(place: Path, where: str) -> None:
    options = ["-k", 5, "--where", where, "--recall", 1]
    result = run("search", place / "index", place / "more.fbin", *options, "--out", place / "out.npy")
    assert result.exit_code == 0, result.output
    found = np.load(place / "out.npy")
    np.testing.assert_array_equal(np.sort(found), np.tile(np.arange(395, 400), (200, 1)))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["add", "index", "more.fbin", "--ids", "known.txt"], 2, "ids holds 3, which is in the index already"),
        (["add", "index", "more.fbin", "--ids", "few.txt"], 2, "--ids: 1 rows for 200 vectors"),
        (["add", "index", "more.fbin", "--attributes", "few.parquet"], 2, "--attributes: 2 rows for 200 vectors"),
        (["add", "index", "more.fbin", "--attributes", "known.txt"], 2, "expected a file ending in .parquet or .jsonl"),
        (["add", "index", "more.fbin", "--attributes", "words.parquet"], 1, "words.parquet"),
        (["add", "index", "many.fbin"], 2, "more vectors need"),
        (["remove", "index", "few.txt"], 2, "ids holds 400, which is not in the index"),
        (["remove", "index", "more.fbin"], 1, "more.fbin"),
        (["remove", "index"], 2, "either a file of IDS or --where"),
        (["remove", "index", "few.txt", "--where", "price < 3"], 2, "either a file of IDS or --where"),
        (["remove", "index", "--where", "cost < 3"], 2, "cost"),
        (["update", "index", "--where", "cost < 3", "--set", '{"price": 1}'], 2, "cost"),
        (["update", "index", "--where", "price < 3", "--set", '{"price": "x"}'], 2, "price"),
        (["update", "index", "--where", "price < 3", "--set", "price=3"], 2, "no JSON"),
        (["update", "index", "--where", "price < 3", "--set", "3"], 2, "expected a dict"),
        (["compact", "none"], 2, "none"),
        (["search", "index", "more.fbin", "--where", "cost < 3"], 2, "cost"),
        (["search", "index", "more.fbin", "--recall", "1.5"], 2, "recall=1.5"),
    ],
)
def test_what_fails_says_why_in_a_line_and_changes_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    (place / "known.txt").write_text("\n".join(map(str, [*range(1000, 1199), 3])))
    (place / "few.txt").write_text("400\n")
    (place / "words.parquet").write_text("no table")
    write_table(place / "few.parquet", [1, 2])
    if "many.fbin" in arguments:
        write_vectors(place / "many.fbin", np.zeros((1_000_000, 12), np.float32))
    monkeypatch.chdir(place)
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert words in result.stderr
    with ZoomIndex.open("index", writable=True) as index:
        assert (len(index), index.stats()["parts"]) == (400, 1)
        assert index.check() == []

"""The corpus on disk, the processes that read it, and the folder that it is built in."""

import json
import multiprocessing
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from memhier.benchmarks.cli.demo import workers
from memhier.benchmarks.cli.demo.corpus import Corpus, CorpusFacts, Listing, ReadFile, read_file, write_corpus
from memhier.benchmarks.cli.demo.measure import choose_queries
from memhier.benchmarks.cli.demo.place import LOCK, VERSION, Built, Place, default_folder
from memhier.benchmarks.cli.demo.sources import SourceFile, source_files
from memhier.errors import LockedError


def sources(folder: Path, files: int) -> list[SourceFile]:
    for i in range(files):
        first = f"def first{i}(a):\n    '''Do the thing number {i} right now.'''\n    return {i}\n"
        (folder / f"m{i:03}.py").write_text(f"{first}\nclass Copied:\n    x = 1\n")
    (folder / "zz_broken.py").write_text("def f(:\n")
    return list(source_files([folder]))


def test_a_corpus_comes_back_as_it_was_written(tmp_path: Path) -> None:
    files = sources(tmp_path, 3)
    facts = write_corpus(tmp_path, map(read_file, files), None)
    corpus = Corpus(tmp_path)
    assert facts == CorpusFacts(functions=4, files=4, unreadable=1, duplicates=2, words=len(corpus.vocabulary))
    assert [listing.name for listing in corpus.listings()] == [
        "m000.first0",
        "m000.Copied",
        "m001.first1",
        "m002.first2",
    ]
    assert [corpus.listing(row) for row in range(len(corpus))] == list(corpus.listings())
    assert corpus.listing(2) == Listing(
        "m001.first1", "def first1(a)", str(tmp_path / "m001.py"), 1, "Do the thing number 1 right now."
    )
    expected = [read.words for file in files for read in read_file(file) or ()]
    del expected[3], expected[4]  # the copies
    words = corpus.words(range(4))
    for row, own in enumerate(expected):
        span = slice(words.starts[row], words.starts[row + 1])
        found = {corpus.vocabulary[n]: w for n, w in zip(words.numbers[span], words.weights[span], strict=True)}
        assert found == pytest.approx(own)
    counted = [sum(word in own for own in expected) for word in corpus.vocabulary]
    assert corpus.standing_in.tolist() == counted


def test_words_of_chosen_rows(tmp_path: Path) -> None:
    write_corpus(tmp_path, map(read_file, sources(tmp_path, 97)), None)
    corpus = Corpus(tmp_path)
    rows = [50, 3, 3, 97]
    chosen = corpus.words(rows)
    singles = [corpus.words([row]) for row in rows]
    np.testing.assert_array_equal(chosen.numbers, np.concatenate([one.numbers for one in singles]))
    np.testing.assert_array_equal(np.diff(chosen.starts), [one.starts[1] for one in singles])
    assert len(corpus.words([]).numbers) == 0


def test_the_limit_stops_the_reading(tmp_path: Path) -> None:
    taken = []

    def results() -> Iterator[list[ReadFile] | None]:
        for file in sources(tmp_path, 9):
            taken.append(file)
            yield read_file(file)

    facts = write_corpus(tmp_path, results(), 3)
    assert (facts.functions, len(Corpus(tmp_path)), len(taken)) == (3, 3, 2)


def test_processes_read_what_one_reads_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sources(tmp_path, 40)
    monkeypatch.setattr(workers, "FILES_FOR_POOL", 1)
    monkeypatch.setattr(workers, "FILES_PER_TASK", 3)
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: {0, 1})
    assert list(workers.read_files(files)) == [read_file(file) for file in files]


def test_processes_end_when_the_reading_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sources(tmp_path, 40)
    monkeypatch.setattr(workers, "FILES_FOR_POOL", 1)
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: {0, 1})
    with closing(workers.read_files(files)) as results:
        next(results)
        assert multiprocessing.active_children()
    assert not multiprocessing.active_children()


def made(folder: Path, sentences: list[str]) -> Corpus:
    listings = [Listing(f"f{i}", "", "", 1, sentence) for i, sentence in enumerate(sentences)]
    write_corpus(
        folder,
        [[ReadFile(one, one.name.encode(), {"w": 1.0})] for one in listings],
        None,
    )
    return Corpus(folder)


def test_queries_are_long_and_of_one_function_only(tmp_path: Path) -> None:
    corpus = made(
        tmp_path,
        ["", "Too short a one.", "This one is long enough.", "Shared by two functions, sadly.",
         "shared  by two functions, SADLY.", "And this one is as well."],
    )  # fmt: skip
    rows, sentences = choose_queries(corpus, 0)
    assert sorted(rows) == [2, 5]
    assert [corpus.listing(row).sentence for row in rows] == sentences
    orders = {tuple(choose_queries(corpus, seed)[0]) for seed in range(20)}
    assert len(orders) == 2
    assert choose_queries(corpus, 7) == choose_queries(corpus, 7)


def test_the_default_folder_respects_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "memhier-demo"
    for value in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert default_folder() == tmp_path / "home" / ".cache" / "memhier-demo"


BUILT = Built("abc", 0, None, 1 << 20)


def test_a_demo_counts_once_it_is_complete(tmp_path: Path) -> None:
    place = Place(tmp_path / "demo")
    with place.locked():
        with place.replaced(BUILT) as folder:
            (folder / "data").write_text("1")
            assert place.built() is None
        assert place.built() == BUILT
        with pytest.raises(RuntimeError), place.replaced(Built("other", 1, 2, 3)) as folder:
            raise RuntimeError
        assert not place.building.exists()
        with place.replaced(Built("other", 1, 2, 3)) as folder:
            assert not (folder / "data").exists()
            assert place.built() == BUILT
    assert Place(tmp_path / "demo").built() == Built("other", 1, 2, 3)
    assert sorted(path.name for path in place.folder.iterdir()) == ["current", LOCK]


@pytest.mark.parametrize("killed", ["building", "between the renames"])
def test_a_killed_build_leaves_nothing_that_counts(tmp_path: Path, killed: str) -> None:
    place = Place(tmp_path / "demo")
    with place.locked(), place.replaced(BUILT):
        pass
    if killed == "building":
        place.building.mkdir()
        (place.building / "built.json").write_text("{")
        assert place.built() == BUILT
    else:
        place.current.rename(place.folder / "old")
        place.building.mkdir()
        assert place.built() is None
    with Place(tmp_path / "demo").locked(), place.replaced(Built("new", 0, None, None)):
        pass
    assert place.built() == Built("new", 0, None, None)
    assert sorted(path.name for path in place.folder.iterdir()) == ["current", LOCK]


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", json.dumps({"version": VERSION}), '{"version": 99}'])
def test_a_description_that_cannot_be_read_is_no_demo(tmp_path: Path, text: str) -> None:
    place = Place(tmp_path)
    place.current.mkdir()
    (place.current / "built.json").write_text(text)
    assert place.built() is None


def test_one_build_at_a_time(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with place.locked(), pytest.raises(LockedError, match="another `memhier demo`"), place.locked():
        pass
    with place.locked(shared=True), place.locked(shared=True), pytest.raises(LockedError), place.locked():
        pass


def test_folders_that_hold_something_else_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(ValueError, match="holds files that are no demo's"):
        Place(tmp_path)
    with pytest.raises(ValueError, match="this is a file"):
        Place(tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "all of it"

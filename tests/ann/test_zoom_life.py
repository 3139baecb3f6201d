"""An index that changes: faults, threads, other processes, memory, and what dividing lists leaves."""

import gc
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.construction import construct
from memhier.ann.zoom.filters.bitmaps import BitmapCache
from memhier.ann.zoom.renewal import life, merge
from memhier.ann.zoom.storage import layout
from memhier.ann.zoom.storage.arrays import PartArrays
from memhier.ann.zoom.storage.catalog import KIND, Description, load_preview
from memhier.ann.zoom.storage.part import IndexPart, PartFiles
from memhier.errors import BudgetError, LockedError
from memhier.fields import stored_array
from memhier.io.reader import Reader
from memhier.shield import settle
from memhier.store.store import Store


def make(count, dimension=12, seed=0, shift=0.0):
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(20, dimension)) * 4 + shift
    return (centers[rng.integers(0, 20, count)] + rng.normal(size=(count, dimension))).astype(np.float32)


def contents(index):
    """Return id and vector of all that an index holds."""
    found = index.search(np.zeros(index.dimension), max(1, len(index)), recall=1.0).ids
    ids = np.sort(found[found >= 0])
    return ids.tolist(), index.reconstruct(ids)


def same(one, other):
    return one[0] == other[0] and np.array_equal(one[1], other[1])


def stored(path):
    """Return the description that was committed last."""
    with Store.open(path, kind=KIND) as store:
        return Description.decode(store.get("index"), store.path)


def starts_of(path):
    """Return where the lists of the only part start."""
    (part,) = stored(path).parts
    with Store.open(path, kind=KIND) as store:
        return stored_array(store, f"{part['name']}-starts", np.int64, (-1,))


def test_an_uncommitted_attribute_leaves_no_trace(tmp_path, small_sizes):
    path = tmp_path / "index"
    with ZoomIndex.build(path, make(200), dram="4MiB") as index:
        index.add(make(300, seed=1), attributes={"price": ["text"] * 300})
    with ZoomIndex.open(path, writable=True) as index:
        assert index.add(make(3, seed=1), attributes={"price": [1, 2, 3]}).tolist() == [200, 201, 202]
        found = index.search(make(1)[0], 3, recall=1.0, where="price > 1").ids
        assert sorted(found.tolist()) == [-1, 201, 202]
        nulls = index.search(make(1)[0], 200, recall=1.0, where="price is null").ids
        assert sorted(nulls.tolist()) == list(range(200))


@pytest.mark.long
def test_searches_while_it_changes_see_one_state_each(tmp_path, small_sizes):
    """Every state holds a multiple of 50 vectors, the versions of which are one apart at most."""
    index = ZoomIndex.build(tmp_path / "index", make(300), dram="8MiB", attributes={"version": [0] * 300})
    ids, stop, wrong, searches = np.arange(300), threading.Event(), [], []

    def search(number):
        try:
            while not stop.is_set():
                state = index.search(make(1, seed=number)[0], len(index), recall=1.0)
                found = state.ids[state.ids >= 0]
                if len(set(found.tolist())) != len(found) or len(found) < len(state.ids) - 50:
                    wrong.append(found)
                versions = index.search(make(2, seed=number), 5, where="version >= 0").ids
                if (versions < 0).any():
                    wrong.append(versions)
                searches.append(1)
        except ValueError as error:  # k, when the vectors became fewer after they were counted
            if "the number of vectors" not in str(error):
                wrong.append(error)
        except BaseException as error:
            wrong.append(error)

    def searching(number):
        while not stop.is_set() and not wrong:
            search(number)

    gc.collect()
    open_before = len(os.listdir("/proc/self/fd"))
    files_before = index.stats()["files"]
    threads = [threading.Thread(target=searching, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for version in range(1, 13):
            index.update(
                ids[version::3], make(len(ids[version::3]), seed=version), {"version": [version] * len(ids[version::3])}
            )
            added = index.add(make(50, seed=version), attributes={"version": [version] * 50})
            if version % 2:
                index.commit()
            if version % 6 == 0:
                index.compact()
            index.remove(added)
            assert not wrong
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(searches) > 4
    index.compact()
    gc.collect()
    assert index.stats()["files"] == files_before
    assert len(os.listdir("/proc/self/fd")) <= open_before + 4  # the reader's rings, of which each thread has one
    assert index.memory_bytes < 8 << 20
    index.close()


def test_files_are_closed_with_the_last_that_has_them(tmp_path):
    ZoomIndex.build(tmp_path / "index", make(200), dram="4MiB").close()
    with Store.open(tmp_path / "index", kind=KIND) as store, Reader() as reader:
        about = Description.decode(store.get("index"), store.path)
        files = PartFiles(store, reader, BitmapCache(1), texts=False, work_bytes=1 << 16, wave_bytes=1 << 16)
        part = files.load(about.parts[0], load_preview(store, about), about.row_bytes, about.schema)
        assert reader.stats()["files"] == 1
        other = replace(part, alive=None)
        del part
        settle()
        assert reader.stats()["files"] == 1
        del other
        settle()
        assert reader.stats()["files"] == 0


@pytest.mark.long
def test_dram_is_kept_until_it_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(construct, "QUERIES", 100)  # to calibrate takes longest, many times
    dimension, dram = 32, 3 << 19
    path = tmp_path / "index"
    index = ZoomIndex.build(path, make(2000, dimension), dram=dram, grow_to=10_000)
    added = 2000
    refused = None
    while refused is None:
        try:
            index.add(make(2000, dimension, seed=added))
        except BudgetError as error:
            refused = error
            break
        added += 2000
        assert index.memory_bytes <= dram
        if added % 10_000 == 0:
            index.commit()
            assert index.memory_bytes <= dram
    assert "grow_to" in str(refused)
    assert 10_000 <= added < 50_000
    assert len(index) == added
    index.remove(np.arange(added // 2))
    assert index.memory_bytes <= dram
    index.compact()
    assert index.memory_bytes <= dram
    index.add(make(2000, dimension, seed=added))
    assert len(index) == added - added // 2 + 2000
    index.search(make(20, dimension), 10)
    assert index.memory_bytes <= dram
    index.close()


READER = """
import sys
from memhier.ann import ZoomIndex
for line in sys.stdin:
    if line == "open\\n":
        index = ZoomIndex.open(sys.argv[1])
    print(len(index), *index.search([0.0] * 12, len(index), recall=1.0).ids.tolist(), flush=True)
"""


@pytest.mark.long
def test_another_process_keeps_its_snapshot_until_it_opens_again(tmp_path, small_sizes):
    path = tmp_path / "index"
    index = ZoomIndex.build(path, make(100), dram="4MiB")
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:

        def ask(word):
            print(word, file=other.stdin, flush=True)
            count, *ids = map(int, other.stdout.readline().split())
            assert len(ids) == count
            return sorted(ids)

        seen = ask("open")
        assert seen == list(range(100))
        for round_number in range(3):
            index.add(make(90, seed=round_number))
            index.remove(seen[:20])
            assert ask("search") == seen
            index.commit()
            assert ask("search") == seen
            index.compact()
            assert ask("search") == seen
            seen = ask("open")
            assert seen == contents(index)[0]
        with pytest.raises(LockedError):
            ZoomIndex.open(path, writable=True)
        other.stdin.close()
    index.close()


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_lists_are_divided_as_they_grow(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(merge, "_CHUNK_BYTES", 20_000)
    start, grown = make(1000), make(6000, seed=1, shift=6.0)
    if dtype == "uint8":
        start, grown = (np.clip(each * 5 + 60, 0, 255).astype(np.uint8) for each in (start, grown))
    with ZoomIndex.build(tmp_path / "index", start, dram="8MiB") as index:
        assert index.stats()["lists"] == 10
        index.add(grown)
        index.remove(np.arange(1000))
        index.compact()
        lengths = np.diff(starts_of(tmp_path / "index"))
        assert 30 <= index.stats()["lists"] <= 60
        assert lengths.min() > 0
        assert lengths.max() <= 3.5 * lengths.mean()
        result = index.search(grown[:200], 1, recall=0.95)
        assert (result.distances[:, 0] <= 0).mean() > 0.97
        assert result.stats["scanned"] < 200 * 3000


def test_a_commit_drops_what_was_removed_once_it_is_a_quarter_of_a_part(tmp_path):
    path = tmp_path / "index"
    with ZoomIndex.build(path, make(2000), dram="4MiB") as index:
        index.remove(np.arange(480))
        index.commit(compact=False)
        assert [part["rows"] for part in stored(path).parts] == [2000]
        before = index.stats()["file_bytes"]
        index.remove(np.arange(480, 1100))
        index.commit(compact=False)
        assert [part["rows"] for part in stored(path).parts] == [900]
        assert index.stats()["file_bytes"] < 0.7 * before
        found = index.search(make(50, seed=1), 5)
        (part,) = stored(path).parts
        with Store.open(path, kind=KIND) as store:
            arrays = PartArrays.load(store, part, preview := load_preview(store, stored(path)))
            radii = merge.radii_of([arrays], preview)
    with ZoomIndex.open(path) as index:
        assert contents(index)[0] == list(range(1100, 2000))
        again = index.search(make(50, seed=1), 5)
        np.testing.assert_array_equal(again.ids, found.ids)
        assert again.stats["scanned"] == found.stats["scanned"]
    with Store.open(path, kind=KIND) as store:
        np.testing.assert_array_equal(stored_array(store, "radii", np.float32, (len(radii),)), radii)


def test_a_part_keeps_removed_rows_up_to_a_quarter(tmp_path):
    path = tmp_path / "index"
    with ZoomIndex.build(path, make(1200), dram="4MiB") as index:
        for removed, rows in ((range(300), 1200), ([300], 899)):
            index.remove(removed)
            index.commit(compact=False)
            assert [part["rows"] for part in stored(path).parts] == [rows]


def test_radii_that_follow_the_changes_are_those_of_all_rows(tmp_path):
    """A commit looks at the rows that it writes, and drops; the rest it takes from the radii before."""
    path, random, vectors = tmp_path / "index", np.random.default_rng(3), make(3000)
    with ZoomIndex.build(path, vectors[:1500], dram="4MiB", grow_to=6000) as index:
        for start in range(1500, 3000, 300):
            index.add(vectors[start : start + 300] * random.uniform(0.9, 1.2))
            index.remove(random.choice(np.concatenate([*index.ids()]), 200, replace=False))
            index.commit(compact=False)
    with Store.open(path, kind=KIND) as store:
        about = stored(path)
        preview = load_preview(store, about)
        arrays = [PartArrays.load(store, part, preview) for part in about.parts]
        np.testing.assert_allclose(preview.radii, merge.radii_of(arrays, preview), rtol=1e-3)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_rows_removed_since_are_those_of_one_bitmap_alone(count):
    random = np.random.default_rng(count)
    none = np.empty((count, 0), np.uint8)
    whole = IndexPart("p0", PartArrays(np.array([0, count]), none, none.T, np.arange(count)), 0, 128)
    first, second = (np.flatnonzero(random.random(count) < 0.3) for _ in range(2))
    before, after = whole.without(first), whole.without(first).without(second)
    np.testing.assert_array_equal(after.removed_since(before.alive), np.setdiff1d(second, first))
    np.testing.assert_array_equal(after.removed_since(None), np.union1d(first, second))
    for same in (whole.removed_since(None), before.removed_since(before.alive)):
        assert not len(same)


def test_a_commit_makes_an_index_anew_that_no_longer_fits(tmp_path, renewed):
    """Replacing half of the vectors by others, far away, leaves recall and lists as a build would make them."""
    near, far = make(3300), make(1800, seed=1, shift=6.0)
    first, second, queries = near[:3000], far[:1500], np.concatenate([near[3000:], far[1500:]])
    left = np.concatenate([first[1500:], second])
    true = np.sort(np.square(queries[:, None] - left).sum(axis=2), axis=1)[:, 9]
    found, scanned = {}, {}
    for compact in (None, False):
        with ZoomIndex.build(tmp_path / str(compact), first, dram="4MiB", grow_to=5000) as index:
            for old, new in zip(np.array_split(np.arange(1500), 5), np.array_split(second, 5), strict=True):
                index.update(old, new)  # two changes for each
                index.commit(compact=compact)
                renewed(index) if compact is None else None
            result = index.search(queries, 10, recall=0.95)
            found[compact] = float((result.distances <= true[:, None] * (1 + 1e-5)).mean())
            scanned[compact] = result.stats["scanned"]
            assert (index.stats()["longest_list"] < 4) == (compact is None)
    assert min(found.values()) > 0.94
    assert scanned[None] < scanned[False]  # lists that do not fit what they hold are all looked through


def test_a_commit_keeps_what_was_tuned(tmp_path):
    with ZoomIndex.build(tmp_path / "index", make(1000), dram="4MiB", grow_to=2000) as index:
        index.tune(make(100, seed=5))
        tuned = stored(tmp_path / "index").calibration.efforts
        index.add(make(900, seed=4))
        index.commit()
        assert stored(tmp_path / "index").calibration.efforts == tuned
    with ZoomIndex.open(tmp_path / "index", writable=True) as index:
        assert stored(tmp_path / "index").calibration.tuned
        index.compact()
        assert not stored(tmp_path / "index").calibration.tuned
        assert stored(tmp_path / "index").calibration.changes == 0


def test_an_index_without_vectors_is_filled_again(tmp_path, small_sizes):
    path = tmp_path / "index"
    with ZoomIndex.build(path, make(700), dram="4MiB") as index:
        lists = index.stats()["lists"]
        index.remove(np.arange(700))
        assert index.search(make(1)[0], 1).ids.tolist() == [-1]
        index.compact()
        assert index.stats()["parts"] == 0
        assert index.stats()["vector_bytes"] == 0
    with ZoomIndex.open(path, writable=True) as index:
        assert len(index) == 0
        assert index.search(make(1)[0], 1).ids.tolist() == [-1]
        names = index.add(make(700))
        assert names[0] == 700
        index.compact()
        assert index.stats()["lists"] >= lists // 2
        assert (index.search(make(700), 1, recall=0.99).distances == 0).mean() > 0.95


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda index: index.add(np.ones((2, 12)), ids=[1, 900]), ValueError, "ids holds 1, .* update"),
        (lambda index: index.add(np.ones((2, 12)), ids=[900, 900]), ValueError, "900 more than once"),
        (lambda index: index.add(np.ones((2, 12)), ids=[900]), ValueError, "1 entry for 2 vectors"),
        (lambda index: index.add(np.ones((2, 11))), ValueError, "12"),
        (lambda index: index.add([[0.0] * 11 + [np.inf]]), ValueError, "row 0"),
        (lambda index: index.add(np.full((1, 12), 1e30)), ValueError, "overflow"),
        (lambda index: index.add(np.ones((1, 12)), attributes={"kind": [1, 2]}), ValueError, "kind"),
        (lambda index: index.remove([1, 900]), KeyError, "900"),
        (lambda index: index.remove([1, 1]), ValueError, "1 more than once"),
        (lambda index: index.update([1, 900], np.ones((2, 12))), KeyError, "900"),
        (lambda index: index.update([1, 2], np.ones((1, 12))), ValueError, "2 entries for 1"),
        (lambda index: index.add(np.ones((2, 12)), ids=[2**63 - 1, 5000]), None, ""),
    ],
)
def test_bad_changes_say_what_was_wrong_and_change_nothing(tmp_path, change, error, message):
    with ZoomIndex.build(tmp_path / "index", make(100), dram="4MiB") as index:
        if error is None:
            change(index)
            with pytest.raises(ValueError, match="none are free"):
                index.add(np.ones((1, 12)))
            assert len(index) == 102
            return
        before, held = contents(index), index.stats()
        with pytest.raises(error, match=message):
            change(index)
        assert same(contents(index), before)
        after = index.stats()
        assert all(after[name] == held[name] for name in ("vectors", "parts", "planned_bytes", "file_bytes"))
        with Store.open(tmp_path / "index", kind=KIND) as store:
            generation = store.generation
        index.commit()  # of nothing
        with Store.open(tmp_path / "index", kind=KIND) as store:
            assert store.generation == generation
        assert index.add(np.ones((1, 12))).tolist() == [100]


def test_a_recall_is_not_known_from_a_tenth_of_changes_to_the_next_commit(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    vectors = random.normal(size=(2000, 8)).astype(np.float32)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB") as index:
        assert index.search(vectors[:1], 10, recall=0.9).stats["calibrated"]
        index.add(random.normal(size=(150, 8)).astype(np.float32))
        assert index.search(vectors[:1], 10, recall=0.9).stats["calibrated"]
        index.remove(np.arange(100))
        assert not index.search(vectors[:1], 10, recall=0.9).stats["calibrated"]
        index.commit()
        assert index.search(vectors[:1], 10, recall=0.9).stats["calibrated"]
    with ZoomIndex.open(tmp_path / "index", writable=True) as index:
        assert index.search(vectors[:1], 10, recall=0.9).stats["calibrated"]
        index.compact()
        assert index.search(vectors[:1], 10, recall=0.9).stats["calibrated"]


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_many_vectors_of_one_call_are_written_in_few_parts(tmp_path, monkeypatch, dtype):
    """The vectors that may wait are few; those of one call are written from the caller's array, and stay the same."""
    monkeypatch.setattr(layout, "_FRESH_MOST", 20_000)
    rows, write = [], life.write_coded

    def counted(tx, name, source, *arguments):
        rows.append(source.count)
        return write(tx, name, source, *arguments)

    monkeypatch.setattr(life, "write_coded", counted)
    vectors = np.random.default_rng(0).integers(0, 200, (2400, 64)).astype(dtype)
    with ZoomIndex.build(tmp_path / "index", vectors[:300], dram="4MiB", grow_to=2500) as index:
        index.add(vectors[300:310], ids=np.arange(300, 310))
        given = vectors[310:].copy()
        index.add(given, ids=np.arange(310, 2400))
        given[:] = 0
        each = 64 * vectors.itemsize + 8
        assert len(rows) <= -(-2400 * each // 20_000) / (2 if dtype == "float32" else 1) + 1
        np.testing.assert_array_equal(index.reconstruct(np.arange(2400)), vectors)
        index.commit()
        np.testing.assert_array_equal(index.reconstruct(np.arange(2400)), vectors)
        assert (index.search(vectors[::40], 1, recall=1.0).distances == 0).all()
        assert index.memory_bytes <= 4 << 20

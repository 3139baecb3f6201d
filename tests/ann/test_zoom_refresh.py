"""A reader that refreshes equals one that opens the index anew, and keeps its state where that fails."""

import contextlib
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.errors import ClosedError, CorruptionError, FormatError
from memhier.shield import settle


def make(count, seed=0, dimension=12):
    return np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)


def same(one, other, **options):
    queries = make(12, 99)
    found, expected = one.search(queries, 7, **options), other.search(queries, 7, **options)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.distances.tolist() == expected.distances.tolist()
    assert found.stats["pages"] == expected.stats["pages"]
    for name, column in found.fields.items():
        assert column.tolist() == expected.fields[name].tolist()


def open_segments(path):
    names = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            names.append(str(each.readlink()))
    return [each for each in names if each.startswith(str(path))]


@pytest.mark.long
@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("verify", ["read", "open", "off"])
def test_a_refreshed_reader_equals_one_that_opens(tmp_path, small_sizes, verify, strings):
    """After additions, removals, new fields, joins of parts, a tuning and a rebuild; with no file left open."""
    path, random = tmp_path / "index", np.random.default_rng(3)

    def names(numbers):
        return [f"n{each}" for each in numbers] if strings else [*numbers]

    given = {"attributes": {"price": [*range(400)]}, "documents": {"text": [f"t{each}" for each in range(400)]}}
    writer = ZoomIndex.build(path, make(400), ids=names(range(400)), dram="4MiB", grow_to=4000, **given)
    reader, known, free = ZoomIndex.open(path, verify=verify), list(range(400)), 400
    for turn in range(12):
        before = reader.search(make(3, 5), 5)
        if turn == 5:
            writer.tune(make(64, 7))
        elif turn != 8:
            more = list(range(free, free + 90))
            new = {"late": [turn] * 90} if turn > 2 else {"price": [turn] * 90}
            writer.add(make(90, turn), names(more), new, {"note": [b"x"] * 90} if turn > 6 else None)
            gone = random.choice(known, 40, replace=False).tolist()
            writer.remove(names(gone))
            known, free = sorted({*known, *more} - {*gone}), free + 90
        writer.commit(compact=turn == 8)
        assert reader.search(make(3, 5), 5).ids.tolist() == before.ids.tolist()
        assert reader.refresh() is True
        assert reader.refresh() is False
        with ZoomIndex.open(path, verify=verify) as anew:
            same(reader, anew)
            same(reader, anew, recall=1.0, fields=True)
            same(reader, anew, where="price > 100 or price is null")
            assert reader.fields == anew.fields
            assert len(reader) == len(anew) == len(known)
            settle()
            assert abs(reader.memory_bytes - anew.memory_bytes) < 1 << 16  # of the reader's own buffers
            assert reader.stats()["planned_bytes"] <= reader.stats()["dram"]
        assert reader.check() == []
    for turn in range(20):
        writer.remove(names(known[turn : turn + 1]))
        writer.commit()
        assert reader.refresh()
    writer.close()
    settle()
    assert not [each for each in open_segments(path) if each.endswith("(deleted)")]  # those of earlier commits
    reader.close()
    settle()
    assert not open_segments(path)
    with pytest.raises(ClosedError):
        reader.refresh()


def test_a_writer_and_an_unfinished_commit_bring_nothing(tmp_path):
    path = tmp_path / "index"
    with ZoomIndex.build(path, make(50), dram="4MiB", grow_to=200) as writer, ZoomIndex.open(path) as reader:
        writer.add(make(5, 1))
        assert not writer.refresh()
        assert not reader.refresh()
        writer.prepare(3)
        reader.refresh()  # the catalog has changed, the index has not
        assert len(reader) == 50
        writer.publish()
        assert reader.refresh()
        assert len(reader) == 55


def test_what_began_before_a_refresh_goes_on(tmp_path):
    path, vectors = tmp_path / "index", make(3000)
    with ZoomIndex.build(path, vectors, dram="4MiB", grow_to=9000) as writer, ZoomIndex.open(path) as reader:
        blocks, ids, near = reader.blocks(), reader.ids(), reader.search_iter(vectors[0], 5)
        first, (names, block) = next(near), next(blocks)
        writer.remove(np.arange(1, 3000))
        writer.add(make(100, 1), np.arange(5000, 5100))
        writer.compact()
        assert reader.refresh()
        assert sorted(np.concatenate([names, *(more for more, _ in blocks)]).tolist()) == list(range(3000))
        np.testing.assert_array_equal(block, vectors[names])
        assert sorted(np.concatenate([*ids]).tolist()) == list(range(3000))
        assert len(reader) == 101
        more = np.concatenate([first.ids, *(each.ids for each in near)]).tolist()  # nothing twice
        assert len(more) == len({*more})
        assert {*range(5000, 5100)} < {*more}


def test_the_largest_id_is_one_as_any_other(tmp_path):
    path, largest = tmp_path / "index", 2**63 - 1
    with ZoomIndex.build(path, make(20), dram="4MiB", grow_to=40) as writer, ZoomIndex.open(path) as reader:
        writer.add(make(1, 1), [largest])
        writer.commit()
        assert reader.refresh()
        assert reader.contains([largest]).all()
        with pytest.raises(ValueError, match="none are free"):
            writer.add(make(1, 2))
    with ZoomIndex.open(path, writable=True) as again:
        assert again.search(make(1, 1)[0], 1).ids.tolist() == [largest]
        again.add(make(1, 3), [21])


def test_searches_from_threads_see_whole_commits(tmp_path):
    """Each commit replaces all vectors of a tag: a search beside refreshes finds one tag alone."""
    path, wrong, ended = tmp_path / "index", [], threading.Event()
    start = {"attributes": {"tag": [0] * 64}}
    with ZoomIndex.build(path, make(64), dram="4MiB", grow_to=1000, **start) as writer, ZoomIndex.open(path) as reader:

        def search():
            while not ended.is_set():
                found = reader.search(make(1, 3)[0], 64, recall=1.0, fields=["tag"])
                if len({*found.fields["tag"].tolist()}) != 1 or (found.ids < 0).any():
                    wrong.append(found)

        threads = [threading.Thread(target=search) for _ in range(3)]
        for thread in threads:
            thread.start()
        for tag in range(1, 25):
            writer.update(np.arange(64), make(64, tag), {"tag": [tag] * 64})
            writer.commit(compact=tag % 8 == 0)
            assert reader.refresh()
        ended.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert reader.fetch([3])["tag"].tolist() == [24]


def test_an_index_built_anew_in_its_place_is_taken_over_where_it_fits(tmp_path):
    path = tmp_path / "index"
    ZoomIndex.build(path, make(300), dram="4MiB").close()
    with ZoomIndex.open(path) as reader:
        found = reader.search(make(2, 9), 3).ids.tolist()
        for dimension, dram in ((13, "4MiB"), (12, "5MiB")):
            shutil.rmtree(path)
            with pytest.raises(FileNotFoundError):
                reader.refresh()
            assert reader.search(make(2, 9), 3).ids.tolist() == found
            ZoomIndex.build(path, make(300, 0, dimension), dram=dram).close()
            with pytest.raises(FormatError, match="another index"):
                reader.refresh()
            assert reader.search(make(2, 9), 3).ids.tolist() == found
        shutil.rmtree(path)
        ZoomIndex.build(path, make(300, 1), dram="4MiB").close()  # with files of the same names and lengths
        assert reader.refresh()
        with ZoomIndex.open(path) as anew:
            same(reader, anew)


def test_a_damaged_commit_leaves_the_reader_as_it_was(tmp_path):
    path = tmp_path / "index"
    with ZoomIndex.build(path, make(300), dram="4MiB", grow_to=900) as writer, ZoomIndex.open(path) as reader:
        found = reader.search(make(2, 9), 3).ids.tolist()
        there = {*(path / "segments").iterdir()}
        writer.add(make(200, 1))
        writer.commit()
        (codes,) = (each for each in {*(path / "segments").iterdir()} - there if "-codes" in each.name)
        whole = codes.read_bytes()
        codes.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        for _ in range(2):
            with pytest.raises(CorruptionError):
                reader.refresh()
            assert reader.search(make(2, 9), 3).ids.tolist() == found
        codes.write_bytes(whole)
        assert reader.refresh()
        assert len(reader) == 500


def test_ids_of_a_filter_are_those_of_one_moment(tmp_path):
    """Beside a thread that adds, commits and removes: every stream is a state that there was."""
    ended, wrong = threading.Event(), []
    start = {"attributes": {"side": [0] * 500}}
    with ZoomIndex.build(tmp_path / "index", make(500), dram="4MiB", grow_to=9000, **start) as index:

        def change():
            while not ended.is_set():
                added = index.add(make(70, 1), attributes={"side": [1] * 70})
                index.commit(compact=False)
                index.remove(added)

        changing = threading.Thread(target=change)
        changing.start()
        for _ in range(400):
            found = np.concatenate([np.empty(0, np.int64), *index.ids("side == 0")])
            if sorted(found.tolist()) != [*range(500)]:
                wrong.append(found)
        ended.set()
        changing.join()
        assert not wrong


@pytest.mark.long
@pytest.mark.parametrize("strings", [False, True])
def test_ids_come_as_a_stream(tmp_path, small_sizes, strings):
    """All of them, and those of a filter: on SSD, removed, waiting, of parts that lack the attribute."""
    every = [f"n{number}" for number in range(40000)] if strings else list(range(40000))
    price = np.arange(40000) % 50
    index = ZoomIndex.build(
        tmp_path / "index", make(0), dram="16MiB", grow_to=40000, ids=np.array(every[:0], "U9" if strings else "i8")
    )
    assert [*index.ids()] == []
    index.add(make(18000, 1), every[:18000])
    index.add(make(20000, 2), every[18000:38000], {"price": price[18000:38000]})
    index.commit(compact=False)
    gone = every[100:30000:7]
    index.remove(gone)
    index.add(make(2000, 3), every[38000:], {"price": price[38000:]})
    index.remove(every[38100:38200])
    gone = {*gone, *every[38100:38200]}
    begun = index.ids(), index.ids("price < 7")
    expected = {each for each in every if each not in gone}
    cheap = {each for number, each in enumerate(every) if number >= 18000 and price[number] < 7} - gone
    index.remove(every[:50])
    index.commit(compact=False)
    for stream, wanted in zip(begun, (expected, cheap), strict=True):
        blocks = [*stream]
        assert len(blocks) > 2
        assert all(block.dtype == (object if strings else np.int64) for block in blocks)
        assert sorted(np.concatenate(blocks).tolist()) == sorted(wanted)
    assert len(np.concatenate([*index.ids("price is null")])) == 18000 - 50 - sum(
        number < 18000 for number in range(100, 30000, 7)
    )
    assert [*index.ids("price > 90")] == []
    for wrong in ("price <", "none == 1", "price == 'x'"):
        with pytest.raises((ValueError, TypeError)):
            index.ids(wrong)
    index.close()
    with pytest.raises(ClosedError):
        index.ids()

"""Commits in two halves: prepared in an index, then published or withdrawn."""

import json
import shutil

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.errors import CorruptionError, LockedError
from memhier.store.store import Store

DIMENSION = 12


def vectors_of(count, seed):
    return np.random.default_rng(seed).normal(size=(count, DIMENSION)).astype(np.float32)


@pytest.fixture
def path(tmp_path):
    """An index of 400 vectors with a document and an attribute each."""
    place = tmp_path / "index"
    ZoomIndex.build(
        place, vectors_of(400, 0), dram="2MiB", grow_to=2000, attributes={"n": np.arange(400)},
        documents={"name": [f"v{n}" for n in range(400)]},
    ).close()  # fmt: skip
    return place


def change(index, round_number):
    """Add, replace and remove some vectors."""
    first = 1000 * (round_number + 1)
    ids = np.arange(first, first + 120)
    index.add(vectors_of(120, first), ids, {"n": ids}, {"name": [f"v{n}" for n in ids]})
    index.update(np.arange(20), vectors_of(20, first + 1), {"n": np.arange(20) + first})
    index.remove(np.arange(30 + 10 * round_number, 40 + 10 * round_number))


def contents(index):
    """Return all ids, vectors and fields, by ascending id."""
    blocks = list(index.blocks())
    ids = np.concatenate([ids for ids, _ in blocks])
    order = np.argsort(ids)
    vectors = np.concatenate([vectors for _, vectors in blocks])[order]
    fields = index.fetch(ids[order])
    return ids[order].tolist(), vectors.tobytes(), fields["n"].tolist(), fields["name"].tolist()


def read(path):
    with ZoomIndex.open(path) as index:
        return contents(index)


def test_readers_see_a_commit_once_it_is_published(path):
    """Until then they open the state before, while the writer sees its changes."""
    before = read(path)
    with ZoomIndex.open(path, writable=True) as index:
        for mark in (1, 2, 7):
            change(index, mark)
            mine = contents(index)
            index.prepare(mark)
            assert contents(index) == mine
            assert read(path) == before
            index.publish()
            assert index.mark == mark
            index.commit()  # joins parts, and changes nothing else
            assert contents(index) == read(path) == mine
            before = mine
        assert index.check() == []


def test_a_withdrawn_commit_leaves_its_changes_for_another(path):
    """Nothing is lost in DRAM, nothing is published."""
    before = read(path)
    with ZoomIndex.open(path, writable=True) as index:
        change(index, 0)
        index.prepare(3)
        index.withdraw()
        assert index.mark == 0
        change(index, 1)
        mine = contents(index)
        assert read(path) == before
        index.prepare(3)
        index.publish()
        assert read(path) == mine
        change(index, 2)
        index.prepare(4)
        index.withdraw()
        index.commit()
        assert contents(index) == read(path)
        assert index.check() == []


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("others", [False, True])
def test_a_writer_that_died_between_the_halves_asks_for_the_decision(path, tmp_path, made, others):
    """The next writer publishes the commit or drops it, as the group says; readers need not ask."""
    index = ZoomIndex.open(path, writable=True)
    if others:  # a commit of the usual kind before
        change(index, 5)
        index.commit()
    before = contents(index)
    change(index, 0)
    after = contents(index)
    index.prepare(9)
    left = tmp_path / "left"
    shutil.copytree(path, left)  # as a killed process leaves it
    index.close()
    assert read(left) == before
    with pytest.raises(LockedError, match="commit 9"):
        ZoomIndex.open(left, writable=True)
    asked = []
    with ZoomIndex.open(left, writable=True, settle=lambda mark: asked.append(mark) or made) as opened:
        assert contents(opened) == (after if made else before)
        assert opened.mark == (9 if made else 0)
        assert opened.check() == []
        change(opened, 3)
        opened.commit()
        expected = contents(opened)
    assert asked == [9]
    with ZoomIndex.open(left, writable=True) as opened:  # the decision stays
        assert contents(opened) == expected


def test_changes_wait_while_a_commit_is_prepared(path):
    """They are refused, and so are halves without the other."""
    with ZoomIndex.open(path, writable=True) as index:
        for half in (index.publish, index.withdraw):
            with pytest.raises(ValueError, match="prepare"):
                half()
        with pytest.raises(ValueError, match="mark"):
            index.prepare(0)
        index.prepare(1)
        for change_of in (
            lambda: index.add(vectors_of(1, 1)), lambda: index.remove([1]), lambda: index.prepare(2),
            lambda: index.update([1], vectors_of(1, 1)), index.commit, index.compact,
            lambda: index.tune(vectors_of(100, 1)),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="commit 1 is prepared"):
                change_of()
        assert index.search(vectors_of(1, 0), 1).ids[0, 0] == 0
        index.publish()
        with pytest.raises(ValueError, match="mark=1"):
            index.prepare(1)
        index.remove([1])
        index.commit()
        assert 1 not in index


def test_a_prepared_index_can_be_renewed_later(path):
    """A rebuild takes over after the commit, also where it began before."""
    with ZoomIndex.open(path, writable=True) as index:
        for mark in range(1, 6):
            change(index, mark)
            index.prepare(mark)
            index.publish()
            index.commit()
        mine = contents(index)
        index.compact()
        assert contents(index) == mine
        change(index, 7)
        index.prepare(6)
        index.publish()
        mine = contents(index)
    assert read(path) == mine


def test_a_damaged_note_is_refused_before_it_replaces_the_index(path):
    """The description to come is checked as any other."""
    half, bare = json.dumps({"mark": 1}), json.dumps({"mark": 1, "index": {"version": 7}})
    for value in (b"no JSON", half.encode(), bare.encode()):
        with Store.open(path, "zoom-index", writable=True) as store, store.begin() as tx:
            tx.put("prepared", value)
            tx.commit()
        with pytest.raises(CorruptionError, match=r"prepared|index"):
            ZoomIndex.open(path, writable=True, settle=lambda _: True)
        read(path)


@pytest.mark.parametrize("way", ["save_to a folder", "save_to a URL", "push"])
def test_a_copy_has_the_commit_before_and_no_note_of_the_one_prepared(path, tmp_path, way):
    """Nobody could settle it: the group does not know the copy."""
    before = read(path)
    url = (tmp_path / "far").as_uri()
    with ZoomIndex.open(path, writable=True) as index:
        change(index, 0)
        index.prepare(3)
        if way == "push":
            pytest.importorskip("fsspec", reason="URLs need the extra remote")
            index.push(url)
        else:
            index.save_to(tmp_path / "copy" if "folder" in way else url)
        index.publish()
        after = contents(index)
        if way == "push":
            assert index.push(url).generation > 1
    if "folder" not in way:
        ZoomIndex.pull(url, tmp_path / "copy")
    wanted = after if way == "push" else before
    assert read(tmp_path / "copy") == wanted
    with ZoomIndex.open(tmp_path / "copy", writable=True) as copy:
        assert contents(copy) == wanted
        assert copy.check() == []
        change(copy, 5)
        copy.commit(compact=True)
        assert copy.check() == []


@pytest.mark.parametrize("settle", [5, "yes", True, {3: True}])
def test_a_decision_is_a_function(path, settle):
    for writable in (True, False):
        with pytest.raises(TypeError, match=r"settle=.*expected a function"):
            ZoomIndex.open(path, writable=writable, settle=settle)
    with ZoomIndex.open(path, writable=True) as index:  # no lock is left behind
        change(index, 0)
        index.prepare(3)
    with pytest.raises(TypeError, match=r"settle\(3\) returned None: expected"):
        ZoomIndex.open(path, writable=True, settle=lambda mark: None)
    with ZoomIndex.open(path, writable=True, settle=lambda mark: np.bool_(mark == 3)) as index:
        assert index.mark == 3

"""ShardedIndex beside one ZoomIndex of the same vectors."""

import contextlib
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray.util", reason="needs the extra ray; `make test-cluster` installs it")

from memhier.ann import ZoomIndex
from memhier.ann.cluster import ShardedIndex
from memhier.ann.cluster.group import ShardGroup
from memhier.errors import BudgetError, ClosedError, FormatError, LockedError, ShardLostError
from tests.cluster.data import COUNT, attributes_of, change, clustered, documents_of, same

pytestmark = pytest.mark.usefixtures("ray")


@pytest.fixture(scope="module", params=["l2", "ip", "cosine"])
def both(request, vectors, tmp_path_factory):
    """One index, and the same on three shards, of each metric."""
    folder, ids = tmp_path_factory.mktemp("both"), np.arange(COUNT)
    given = {
        "attributes": attributes_of(ids), "documents": documents_of(ids), "metric": request.param, "dram": "12MiB",
        "grow_to": 2 * COUNT,
    }  # fmt: skip
    with (
        ZoomIndex.build(folder / "one", vectors, **given) as one,
        ShardedIndex.build(folder / "sharded", vectors, shards=3, **given) as sharded,
    ):
        yield one, sharded


@pytest.mark.parametrize("where", [None, "n < 900 and lang == 'en'", "rare == true", "share > 100", "n < 0"])
def test_with_everything_asked_results_are_those_of_one_index(both, where):
    one, sharded = both
    queries = clustered(40, 1)
    for k in (1, 7):
        options = {"recall": 1.0, "where": where, "fields": ["n", "rare", "share", "when", "lang", "text", "more"]}
        same(one.search(queries, k, **options), sharded.search(queries, k, **options))
    same(one.search(queries[0], 5, recall=1.0, fields=True), sharded.search(queries[0], 5, recall=1.0, fields=True))


@pytest.mark.parametrize("where", [None, "n >= share and not n == share or lang < lang"])
def test_lists_of_ids_of_any_kind_and_attributes_compared(both, where):
    one, sharded = both
    queries = clustered(9, 8)
    options = {"recall": 1.0, "where": where, "fields": ["n", "share"]}
    found = one.search(queries, 5, allow=range(40), **options).ids  # with missing neighbours
    for kind in (np.asarray, lambda ids: set(ids.ravel().tolist()), lambda ids: iter(ids.ravel())):
        for name in ("allow", "deny"):
            given = [options | {name: kind(found)} for _ in both]
            same(one.search(queries, 5, **given[0]), sharded.search(queries, 5, **given[1]))
    for index in both:
        with pytest.raises(TypeError, match="'lang' is str; it cannot be compared with attribute 'n', which is int64"):
            index.search(queries, 1, where="lang == n")


def test_a_radius_cuts_as_in_one_index(both):
    one, sharded = both
    queries = clustered(20, 2)
    radius = one.search(queries, 6, recall=1.0).distances[:, 3]
    same(one.search(queries, 6, recall=1.0, radius=radius), sharded.search(queries, 6, recall=1.0, radius=radius))
    far = float(radius.max())
    same(one.search(queries, 6, recall=1.0, radius=far), sharded.search(queries, 6, recall=1.0, radius=far))


@pytest.mark.parametrize("recall", [0.9, 0.95, 0.99])
def test_a_declared_recall_holds_over_all_shards(both, recall):
    one, sharded = both
    queries = clustered(400, 3)
    exact, found = one.search(queries, 10, recall=1.0), sharded.search(queries, 10, recall=recall)
    hits = np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(exact.ids, found.ids, strict=True)])
    assert hits >= recall - 0.02  # 400 queries
    assert found.stats["recall"] == recall
    assert len(queries) <= found.stats["shard_requests"] <= 3 * len(queries)


def test_clustered_vectors_ask_few_shards(both):
    """Most queries end at the shard of their own cluster."""
    sharded = both[1]
    if sharded.metric == "ip":
        pytest.skip("the nearest by inner product are the longest, wherever they lie")
    assert sharded.search(clustered(300, 4), 10, recall=0.95).stats["shard_requests"] < 2 * 300


def test_vectors_and_fields_come_back_by_id(both):
    one, sharded = both
    ids = np.array([2999, 5, 17, 5, 0])
    np.testing.assert_array_equal(one.reconstruct(ids), sharded.reconstruct(ids))
    mine, theirs = sharded.fetch(ids), one.fetch(ids)
    assert {name: repr(column.tolist()) for name, column in mine.items()} == {
        name: repr(column.tolist()) for name, column in theirs.items()
    }
    assert sharded.contains([3, 5000, 2999]).tolist() == [True, False, True]
    with pytest.raises(KeyError, match="7777"):
        sharded.fetch([3, 7777])


@pytest.mark.parametrize("argument", [
    {"k": 0}, {"recall": 0.0}, {"recall": 1.5}, {"where": "nothing == 1"}, {"where": "n <"}, {"fields": ["none"]},
    {"radius": [1.0]}, {"radius": np.nan},
])  # fmt: skip
def test_errors_are_those_of_one_index(both, argument):
    """The caller sees the error itself, not that of a remote task."""
    queries = clustered(3, 5)
    raised = []
    for index in both:
        with pytest.raises((ValueError, TypeError)) as error:
            index.search(queries, **({"k": 2} | argument))
        raised.append(type(error.value))
    assert raised[0] is raised[1]
    for wrong in (queries[:, :5], queries * np.nan):
        with pytest.raises(ValueError, match="queries"):
            both[1].search(wrong, 2)


def test_changes_equal_those_of_one_index(pair):
    """Also with new attributes, moved vectors and ids of its own; readers see commits, rollback drops changes."""
    one, sharded, path = pair
    queries = clustered(30, 6)

    names = [*one.fields]

    def compare(other):
        found = one.search(queries, 5, recall=1.0, fields=names)
        same(found, other.search(queries, 5, recall=1.0, fields=names))
        assert len(one) == len(other)

    for round_number in range(2):
        change(one, round_number)
        change(sharded, round_number)
        compare(sharded)
        one.commit()
        sharded.commit()
        compare(sharded)
    for index in (one, sharded):
        assert index.add(clustered(3, 7), attributes={"fresh": [1, None, 3]}).tolist() == [20200, 20201, 20202]
    same(
        one.search(queries, 2, recall=1.0, where="fresh >= 1"),
        sharded.search(queries, 2, recall=1.0, where="fresh >= 1"),
    )
    with ShardedIndex.open(path) as reader:
        assert len(reader) == len(sharded) - 3
        with pytest.raises(OSError, match="writable"):
            reader.remove([1])
    with pytest.raises(LockedError):
        ShardedIndex.open(path, writable=True, patience=1.0)
    sharded.rollback()
    assert len(sharded) == len(one) - 3
    assert "fresh" in one.fields.keys() - sharded.fields.keys()
    assert not sharded.contains([20201]).any()
    one.remove([20200, 20201, 20202])
    compare(sharded)
    for index in (one, sharded):
        index.update([100, 101, 102], attributes={"n": [-1, None, -7]})
    compare(sharded)
    documents = [{"text": "new"}, {"more": {"half": -1}}, {}] * 10
    rows = [{"n": -1}, {"lang": "fr", "n": None}, {"share": 0.5, "late": 3}, {}, {"rare": True}] * 6
    for index in (one, sharded):
        index.update(np.arange(30) + 300, attributes=rows, documents=documents)  # a name that a dict lacks stays
        index.update(np.arange(30) + 400, clustered(30, 77), rows, documents)  # also of a vector that moves
        index.update([7], attributes=[{"odd": "x"}])  # all shards know it
    for where in ("late == 3", "odd == 'x'", "odd is null and n < 20"):
        some = {"recall": 1.0, "where": where, "fields": [*names, "late", "odd"]}
        same(one.search(queries, 5, **some), sharded.search(queries, 5, **some))
    gone = one.remove(where="n < 60")
    assert gone > 2
    assert sharded.remove(where="n < 60") == gone
    compare(sharded)
    some = {"allow": range(50, 400), "deny": [200, 201, 10**9], "recall": 1.0, "fields": names}
    same(one.search(queries, 5, **some), sharded.search(queries, 5, **some))
    assert sharded.check() == []
    sharded.commit()
    sharded.close()
    sharded.close()
    with pytest.raises(ClosedError):
        sharded.search(queries, 1)
    with ShardedIndex.open(path, writable=True) as again:
        compare(again)
        assert again.stats()["epoch"] == 3


@pytest.mark.parametrize("how", ["build", "add", "update"])
def test_shards_without_a_value_know_the_attribute(tmp_path, vectors, how):
    """Each shard but one has nulls alone."""
    one = {
        "words": ["a", "b"], "shares": [0.5, 2], "flags": [True], "counts": [7], "word": "x", "share": 1.5, "n": 3,
        "flag": False, "when": np.datetime64("2020-01-01", "us"),
    }  # fmt: skip
    conditions = [
        "words contains 'b'", "shares contains 2", "flags contains true", "counts contains 7", "word == 'x'",
        "share == 1.5", "n == 3", "flag == false", "when > '2019-01-01'",
    ]  # fmt: skip
    columns = {name: [None] * 4 + [value] + [None] * 295 for name, value in one.items()}
    options = {"attributes": columns if how == "build" else None, "dram": "12MiB", "grow_to": 400}
    with ShardedIndex.build(tmp_path / "x", vectors[:300], shards=3, **options) as index:
        index.add(vectors[:20] + 1)
        row = 4
        if how == "add":
            (row,) = index.add(vectors[4:5], attributes=[one]).tolist()
        elif how == "update":
            index.update([7, 4, 9], attributes=[{}, one, {}])
        for _ in range(2):
            for name, where in zip(one, conditions, strict=True):
                assert index.search(vectors[4], 3, recall=1.0, where=where).ids.tolist() == [row, -1, -1], where
                kept = index.search(vectors[4], 400, recall=1.0, where=f"{name} is null").ids
                assert len(np.setdiff1d(kept, [-1, row])) == len(index) - 1, name
            index.commit()
        assert index.check() == []


def test_an_upsert_equals_that_of_one_index(pair):
    """With vectors that stay, that move and that are new, some with fields, and some with a new attribute."""
    one, sharded, _ = pair
    queries, names = clustered(30, 6), [*one.fields]
    rows = [{"n": -1, "new": 5}, {"lang": "fr", "n": None}, {"share": 0.5}, {}, {"rare": True, "new": None}] * 6
    documents = [{"text": "new"}, {"more": {"half": -1}}, {}] * 10
    ids = np.concatenate([np.arange(30) + 500, np.arange(30) + 30000])[np.random.default_rng(8).permutation(60)]
    for index in (one, sharded):
        assert index.upsert(ids[:30], clustered(30, 78), rows, documents) == (ids[:30] >= 30000).sum()
        assert index.upsert(ids, clustered(60, 79)) == (ids[30:] >= 30000).sum()
        assert index.upsert([], clustered(0, 7)) == 0
        assert index.add(clustered(1, 80)).tolist() == [30030]
    for where in (None, "new == 5", "rare == true", "new is null and n < 20"):
        some = {"recall": 1.0, "where": where, "fields": [*names, "new"]}
        same(one.search(queries, 9, **some), sharded.search(queries, 9, **some))
    fetched = one.fetch(ids), sharded.fetch(ids)
    assert {name: str(column.tolist()) for name, column in fetched[0].items()} == {
        name: str(column.tolist()) for name, column in fetched[1].items()
    }
    np.testing.assert_array_equal(one.reconstruct(ids), sharded.reconstruct(ids))
    assert len(one) == len(sharded)
    for wrong in (([1], None), ([1, 1], clustered(2, 0)), ([1], clustered(2, 0)), (["x"], clustered(1, 0))):
        with pytest.raises((ValueError, TypeError)):
            sharded.upsert(*wrong)
    sharded.commit()
    assert sharded.check() == []


def test_an_update_by_filter_equals_that_of_one_index(pair):
    """Of known attributes and new ones, also where the filter leaves no vector, or none of a shard."""
    one, sharded, path = pair
    queries, names = clustered(30, 6), [*one.fields]
    for index in (one, sharded):
        index.update([7, 8], attributes={"late": [3, 3]})
    for where, values in (
        ("n between 60 and 90", {"lang": "set", "share": None}), ("late == 3", {"late": 4, "own": [1, 2]}),
        ("n == -99", {"nowhere": 1}), ("lang == 'set'", {"nowhere": 2}),
    ):  # fmt: skip
        changed = one.update(where=where, attributes=values)
        assert (changed > 0) == (where != "n == -99")
        assert sharded.update(where=where, attributes=values) == changed
    some = {"recall": 1.0, "where": "nowhere == 2 or late == 4", "fields": [*names, "late", "own", "nowhere"]}
    same(one.search(queries, 5, **some), sharded.search(queries, 5, **some))
    sharded.commit()
    with ShardedIndex.open(path) as reader:
        same(one.search(queries, 5, **some), reader.search(queries, 5, **some))


@pytest.mark.parametrize("change", ["update", "upsert"])
def test_a_change_that_fails_half_way_loses_no_vector(tmp_path, change):
    """A vector leaves its shard for one that refuses its document: no commit makes half of that durable."""
    vectors = clustered(800, 3)
    with ShardedIndex.build(tmp_path / "index", vectors, shards=2, dram="2MiB") as index:
        for other in range(4, 800, 160):  # some of them lie in the other shard
            with pytest.raises((BudgetError, ValueError)):
                getattr(index, change)([3], vectors[[other]], documents=[{"text": "x" * 200_000}])
            with contextlib.suppress(ShardLostError):  # which says that only a rollback helps
                index.commit()
            index.rollback()
            np.testing.assert_array_equal(index.reconstruct([3]), vectors[[3]])
        with pytest.raises((BudgetError, ValueError)):  # by every shard, before it changed anything
            getattr(index, change)([3, 4], vectors[[3, 4]], documents=[{"text": "x" * 200_000}] * 2)
        index.commit()
        assert len(index) == 800
        assert index.check() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_change_that_is_interrupted_is_never_committed_by_half(tmp_path, vectors, monkeypatch, when):
    with ShardedIndex.build(tmp_path / "index", vectors[:500], shards=2, dram="8MiB") as index:
        tell = ShardGroup.tell

        def interrupted(group, calls):
            if when == "after":
                tell(group, calls[:1])
            raise KeyboardInterrupt

        monkeypatch.setattr(ShardGroup, "tell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            index.remove(np.arange(300))
        monkeypatch.undo()
        with pytest.raises(ShardLostError, match="rollback"):
            index.commit()
        index.rollback()
        assert index.contains(np.arange(500)).all()
        index.remove([3])
        index.commit()
        assert len(index) == 499


def test_wrong_changes_are_refused_before_anything_changes(pair):
    _, sharded, _ = pair
    for wrong in (
        lambda: sharded.add(clustered(2, 1), [5, 10_000]), lambda: sharded.add(clustered(2, 1), [10_000]),
        lambda: sharded.add(clustered(2, 1), ["a", "b"]), lambda: sharded.add(clustered(2, 1)[:, :3]),
        lambda: sharded.add(clustered(2, 1), attributes={"n": ["x", "y"]}), lambda: sharded.remove([1, 1]),
        lambda: sharded.update([1, 2], clustered(1, 1)), lambda: sharded.add(clustered(1, 1), documents=[{}, {}]),
        lambda: sharded.update([1], documents=[{}, {}]), lambda: sharded.update([1, 2], documents=[{}]),
        lambda: sharded.update([1], documents=[3]), lambda: sharded.update([1], documents={"text": iter("ab")}),
        lambda: sharded.update([1], attributes=[{}, {}]), lambda: sharded.update([1, 2], attributes=[{"n": 1}]),
        sharded.remove, lambda: sharded.remove([1], where="n > 1"), lambda: sharded.remove(where="n >"),
        lambda: sharded.remove(where="none > 1"), lambda: sharded.remove(where="n > 'x'"),
        lambda: sharded.update(where="n > 1", attributes={"n": "x"}), lambda: sharded.update(where="n > 1"),
        lambda: sharded.update([1], where="n > 1", attributes={"n": 1}), lambda: sharded.update(attributes={"n": 1}),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            wrong()
    with pytest.raises(KeyError, match="9999"):
        sharded.remove([1, 9999])
    with pytest.raises(KeyError, match="9999"):
        sharded.update([1, 9999], clustered(2, 1))
    assert len(sharded) == COUNT
    assert sharded.contains([1]).all()
    sharded.commit()
    assert sharded.stats()["epoch"] == 0


def test_searches_go_on_while_replicas_die(pair):
    """A lost replica costs time, no answer; it comes back by itself."""
    one, sharded, _ = pair
    queries = clustered(25, 8)
    exact = one.search(queries, 4, recall=1.0)
    for shard, replica in [(0, 0), (1, 1), (2, 0), (2, 1), (0, 1)]:
        sharded.simulate_fault(shard, replica)
        same(exact, sharded.search(queries, 4, recall=1.0))


def test_a_replica_that_lost_changes_comes_back_as_a_copy(pair):
    """While it lacks them it answers nothing; all replicas equal the index after heal()."""
    one, sharded, _ = pair
    queries = clustered(25, 9)
    change(one, 0)
    change(sharded, 0)
    sharded.simulate_fault(1, 0)
    exact = one.search(queries, 4, recall=1.0)
    for _ in range(4):
        same(exact, sharded.search(queries, 4, recall=1.0))
    with pytest.raises(ValueError, match="commit"):
        sharded.heal()
    sharded.commit()
    change(one, 1)
    change(sharded, 1)
    sharded.commit()
    assert sharded.stats()["stale"] == [(1, 0)]
    sharded.heal()
    assert sharded.stats()["stale"] == []
    exact = one.search(queries, 4, recall=1.0)
    sharded.simulate_fault(1, 1)
    same(exact, sharded.search(queries, 4, recall=1.0))
    assert sharded.check() == []


def test_a_copy_goes_on_while_the_good_replica_dies_again_and_again(pair, monkeypatch):
    """Its process ends between two pieces, and amid one."""
    one, sharded, folder = pair
    monkeypatch.setattr("memhier.ann.cluster.group._PIECE_BYTES", 500)
    change(one, 0)
    change(sharded, 0)
    sharded.simulate_fault(1, 0)
    sharded.commit()
    assert sharded.stats()["stale"] == [(1, 0)]
    ended = threading.Event()

    def kill():
        while len(kills) < 4 and not ended.wait(0.01):
            if any(Path(folder).rglob("shard-0001-0.new/index/*")):  # amid a copy
                sharded.simulate_fault(1, 1)
                kills.append(1)

    kills = []
    killer = threading.Thread(target=kill)
    killer.start()
    sharded.heal()
    ended.set()
    killer.join()
    assert kills
    for shard, replica in sharded.stats()["stale"]:
        assert (shard, replica) == (1, 1)
    sharded.heal()
    queries = clustered(25, 9)
    exact = one.search(queries, 4, recall=1.0)
    for _ in range(2):
        same(exact, sharded.search(queries, 4, recall=1.0))
    assert sharded.check() == []


def test_changes_lost_with_every_replica_are_said(pair):
    """The commit is refused; a rollback returns to the last one, and all goes on."""
    one, sharded, _ = pair
    queries = clustered(25, 10)
    before = one.search(queries, 4, recall=1.0)
    change(sharded, 0)
    for replica in (0, 1):
        sharded.simulate_fault(2, replica)
    with pytest.raises(ShardLostError, match="rollback"):
        sharded.commit()
    with pytest.raises(ShardLostError, match="rollback"):
        sharded.remove([3])
    with pytest.raises(ShardLostError, match="partial"):
        sharded.search(queries, 4, recall=1.0)
    some = sharded.search(queries, 4, recall=1.0, partial=True)
    assert some.stats["lost_shards"] == [2]
    sharded.rollback()
    same(before, sharded.search(queries, 4, recall=1.0))
    change(one, 1)
    change(sharded, 1)
    sharded.commit()
    same(one.search(queries, 4, recall=1.0), sharded.search(queries, 4, recall=1.0))


@pytest.mark.parametrize("step", ["prepared", "noted", "published"])
def test_a_commit_cut_short_is_on_all_shards_or_on_none(vectors, tmp_path, step):
    """The folders are those of a writer that died after each step, on some shards or on all."""
    from memhier.ann.cluster.cluster_map import ClusterMap
    from memhier.ann.cluster.shard import Shard

    path = tmp_path / "sharded"
    ShardedIndex.build(path, vectors, shards=3, dram="12MiB", grow_to=2 * COUNT).close()
    queries = clustered(20, 11)
    with ShardedIndex.open(path) as index:
        before = index.search(queries, 5, recall=1.0)
    shards = [Shard(str(path), number, 0) for number in range(3)]
    cells = ClusterMap.read(path / "shard-0000-0").cells
    more = clustered(300, 12)
    owners = cells.owner(more)
    for number, shard in enumerate(shards):
        shard.open(0, True)
        mine = np.flatnonzero(owners == number)
        shard.add(more[mine], 50_000 + mine, {}, None, {})
        if step != "prepared" or number != 1:  # the writer died before shard 1 was ready
            shard.prepare(1)
    if step != "prepared":
        shards[0].note({"epoch": 1, "next_id": 50_300})
    if step == "published":
        shards[2].publish()
    left = tmp_path / "left"
    shutil.copytree(path, left)
    for shard in shards:
        shard.close()
    if step == "noted":
        with pytest.raises(LockedError, match="writable"):
            ShardedIndex.open(left, patience=0.5)
    with ShardedIndex.open(left, writable=True) as index:
        assert len(index) == COUNT + (0 if step == "prepared" else 300)
        assert index.contains(50_000 + np.arange(300)).all() == (step != "prepared")
        if step == "prepared":
            same(before, index.search(queries, 5, recall=1.0))
        assert index.add(more[:1]).tolist() == [COUNT if step == "prepared" else 50_300]
        index.commit()
        assert index.check() == []
    with ShardedIndex.open(left) as index:
        assert len(index) == COUNT + (1 if step == "prepared" else 301)


def test_few_vectors_or_none_and_strings_as_ids(tmp_path):
    """Shards may be empty; everything is found all the same."""
    names = [f"item {n}" for n in range(5)]
    with ShardedIndex.build(tmp_path / "few", clustered(5, 1), shards=4, ids=names, dram="8MiB", grow_to=500) as index:
        assert len(index) == 5
        assert index.search(clustered(5, 1), 1, recall=1.0).ids[:, 0].tolist() == names
        assert sorted(index.search(clustered(1, 1)[0], 9).ids[:5].tolist()) == names
        assert index.search(clustered(1, 1)[0], 9).ids[5:].tolist() == [None] * 4
        index.add(clustered(50, 2), [f"more {n}" for n in range(50)])
        index.commit()
        assert len(index) == 55
    with ShardedIndex.build(
        tmp_path / "none", np.empty((0, 8), "float32"), shards=2, dram="8MiB", grow_to=900
    ) as index:
        assert index.search(np.zeros((2, 8)), 3).ids.tolist() == [[-1] * 3] * 2
        index.add(np.random.default_rng(0).normal(size=(700, 8)).astype("float32"))
        index.commit()
        assert index.search(index.reconstruct([650]), 1, recall=1.0).ids.tolist() == [[650]]
        assert index.search(np.empty((0, 8)), 3).ids.shape == (0, 3)


def test_places_are_checked(tmp_path, vectors):
    """A build leaves nothing behind; shards of several indexes are told apart."""
    with pytest.raises(FileNotFoundError, match="shards"):
        ShardedIndex.open(tmp_path / "nothing")
    for wrong in (
        {"shards": 0},
        {"shards": 2, "replicas": 0},
        {"shards": 2, "metric": "hamming"},
        {"shards": 2, "ids": [1]},
    ):
        with pytest.raises(ValueError, match=min(wrong.keys() - {"shards"}, default="shards")):
            ShardedIndex.build(tmp_path / "new", vectors, dram="12MiB", **wrong)
    wrong = vectors.copy()
    wrong[2000] = np.nan
    with pytest.raises(ValueError, match="2000"):
        ShardedIndex.build(tmp_path / "new", wrong, shards=2, dram="12MiB")
    with pytest.raises(ValueError, match="dram"):
        ShardedIndex.build(tmp_path / "new", vectors, shards=2, dram="1KiB")
    assert not (tmp_path / "new").exists()
    for name in ("a", "b"):
        ShardedIndex.build(tmp_path / name, vectors[:500], shards=2, dram="12MiB").close()
    with pytest.raises(FileExistsError, match="shards"):
        ShardedIndex.build(tmp_path / "a", vectors[:500], shards=2, dram="12MiB")
    shutil.rmtree(tmp_path / "a" / "shard-0001-0")
    with pytest.raises(ShardLostError, match=r"\[1\]"):
        ShardedIndex.open(tmp_path / "a", patience=0.5)
    shutil.copytree(tmp_path / "b" / "shard-0001-0", tmp_path / "a" / "shard-0001-0")
    with pytest.raises(FormatError, match="another index"):
        ShardedIndex.open(tmp_path / "a")


def test_a_reader_refreshes_to_the_newest_commit(pair):
    """Beside searches of a thread, each of which sees whole commits; also over a resharding."""
    one, sharded, path = pair
    queries, ended, wrong = clustered(20, 11), threading.Event(), []
    with ShardedIndex.open(path) as reader:
        sizes = {len(reader)}

        def search():
            while not ended.is_set():
                if (count := len(np.unique(reader.search(queries[:1], COUNT + 500, recall=1.0).ids)) - 1) not in sizes:
                    wrong.append(count)

        searching = threading.Thread(target=search)
        searching.start()
        assert not reader.refresh()
        assert not sharded.refresh()
        for turn in range(2):
            change(one, turn)
            change(sharded, turn)
            assert not reader.refresh()
            sizes.add(len(sharded))
            sharded.commit()
            assert reader.refresh()
            same(one.search(queries, 5, recall=1.0), reader.search(queries, 5, recall=1.0))
        sharded.reshard(2)
        assert reader.refresh()
        assert not reader.refresh()
        ended.set()
        searching.join()
        assert not wrong
        same(one.search(queries, 5, recall=1.0), reader.search(queries, 5, recall=1.0))
        assert reader.stats()["shards"] == 2
        for where in (None, "n < 100", "n < -100"):
            blocks = [*reader.ids(where)]
            assert all(block.dtype == np.int64 for block in blocks)
            expected = np.concatenate([np.empty(0, np.int64), *one.ids(where)])
            assert sorted(np.concatenate(blocks).tolist()) == sorted(expected.tolist())
        with pytest.raises(ValueError, match="none"):
            reader.ids("none > 3")
    with pytest.raises(ClosedError):
        reader.refresh()

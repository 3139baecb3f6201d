"""Work of an index beside its commits: joins of parts and renewals, while the index goes on changing."""

import contextlib
import gc
import os
import threading
import time

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.construction import construct
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.renewal import beside, life, merge, spill


def make(count, dimension=12, seed=0, shift=0.0):
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(20, dimension)) * 4 + shift
    return (centers[rng.integers(0, 20, count)] + rng.normal(size=(count, dimension))).astype(np.float32)


def holds(index, rows):
    """Whether an index holds just these vectors, ``{id: (vector, third)}``, and finds and filters them."""
    names = list(rows)
    if len(index) != len(rows):
        return False
    vectors = np.array([vector for vector, _ in rows.values()], np.float32)
    if not np.array_equal(index.reconstruct(names), vectors):
        return False
    if not (index.search(vectors[:: len(vectors) // 5], 1, recall=1.0).distances[:, 0] == 0).all():
        return False
    found = index.search(vectors[0], len(rows), recall=1.0, where="third == 1").ids
    return {each for each in found.tolist() if each not in (-1, None)} == {
        name for name, (_, third) in rows.items() if third == 1
    }


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zoom-")]


def wait_until(index, stands):
    deadline = time.monotonic() + 600
    while index.stats()["renewal"] != stands:
        assert time.monotonic() < deadline, index.stats()
        time.sleep(0.005)


class Model:
    """An index beside a dict of its vectors."""

    def __init__(self, path, strings, count):
        self.strings, self.rows, self.next, self.rng = strings, {}, 0, np.random.default_rng(5)
        vectors = make(count)
        self.index = ZoomIndex.build(
            path, vectors, ids=self._names(vectors), attributes=self._thirds(count), dram="8MiB", grow_to=4 * count
        )
        self._note(self._last, vectors)

    def _names(self, vectors):
        numbers = range(self.next, self.next + len(vectors))
        self._last = [f"name{number}" if self.strings else number for number in numbers]
        self.next += len(vectors)
        return self._last

    @staticmethod
    def _thirds(count):
        return {"third": np.arange(count) % 3}

    def _note(self, names, vectors):
        self.rows |= {name: (vector, at % 3) for at, (name, vector) in enumerate(zip(names, vectors, strict=True))}

    def add(self, count, shift=0.0):
        vectors = make(count, seed=self.next, shift=shift)
        self.index.add(vectors, ids=self._names(vectors), attributes=self._thirds(count))
        self._note(self._last, vectors)

    def change(self, count):
        """Add some, update some and remove some, old ones and new ones."""
        self.add(count)
        names = [list(self.rows)[at] for at in self.rng.permutation(len(self.rows))[: count + count // 2]]
        vectors = make(count, seed=self.next + 1)
        self.index.update(names[:count], vectors)
        for name, vector in zip(names[:count], vectors, strict=True):
            self.rows[name] = vector, self.rows[name][1]
        changed = names[::3]
        self.index.update(changed, attributes={"third": [7] * len(changed)})
        for name in changed:
            self.rows[name] = self.rows[name][0], 7
        self.index.remove(names[count:])
        for name in names[count:]:
            del self.rows[name]


def test_no_commit_does_much_more_than_others(tmp_path, monkeypatch):
    """Rows that the committing thread puts in order: all that it writes go through that."""
    monkeypatch.setattr(life, "_FEW_ROWS", 1)
    monkeypatch.setattr(construct, "QUERIES", 100)
    ordered = []
    for module in (spill, merge, construct):

        def counted(book, codes, *arguments, order=module.page_order, **options):
            if not threading.current_thread().name.startswith("zoom-"):
                ordered[-1] += len(codes)
            return order(book, codes, *arguments, **options)

        monkeypatch.setattr(module, "page_order", counted)
    ordered.append(0)
    times_renewed, commits = 0, 0
    pool = make(20_000)
    queries = pool[-200:]
    with ZoomIndex.build(tmp_path / "index", pool[:2000], dram="4MiB", grow_to=6000) as index:
        while commits < 24 or times_renewed < 1:
            index.add(pool[len(index) : len(index) + 60])
            ordered.append(0)
            before = index.stats()["trained_vectors"]
            index.commit()
            times_renewed += before != index.stats()["trained_vectors"]
            commits += 1
            assert commits < 250
            if commits > 24:
                time.sleep(0.2)
        everything = index.reconstruct(np.arange(len(index)))
        true = np.sort(np.square(queries[:, None] - everything).sum(axis=2), axis=1)[:, 9:10]
        found = index.search(queries, 10, recall=0.95).distances
        assert (found <= true * (1 + 1e-5)).mean() > 0.94
    work = np.array(ordered[1:])
    assert work.min() >= 60
    assert work.max() <= 5 * np.median(work)


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("few", [1, 1024])
def test_changes_while_an_index_is_made_anew_are_carried_over(tmp_path, monkeypatch, held, strings, few):
    """With `few` rows that a commit takes on, what came meanwhile is made up for beside others, in rounds."""
    monkeypatch.setattr(life, "_FEW_ROWS", few)
    model = Model(tmp_path / "index", strings, 500)
    with model.index as index:
        with held(life, "renew") as begun:
            model.add(200, shift=3.0)
            index.commit()
            assert begun == [1]
            assert index.stats()["renewal"] == "running"
            for _ in range(4):
                model.change(40)
                index.commit()
                assert holds(index, model.rows)
            model.change(40)
        while index.stats()["calibrated_vectors"] == 500:
            wait_until(index, "ready")
            model.change(3)
            index.commit()
            assert holds(index, model.rows)
        assert index.check() == []
        index.close()
    assert os.listdir(tmp_path / "index" / "tmp") == []
    assert threads() == []
    with ZoomIndex.open(tmp_path / "index", verify="open") as index:
        assert holds(index, model.rows)


@pytest.mark.parametrize("few", [1, 1024])
def test_vectors_that_drift_away_while_an_index_is_made_anew_are_known(tmp_path, monkeypatch, held, few):
    monkeypatch.setattr(life, "_FEW_ROWS", few)
    base, away = make(3000, 48), make(60, 48, seed=1, shift=1.0)
    away += np.linspace(3, 10, 60, dtype=np.float32)[:, None]
    with ZoomIndex.build(tmp_path / "index", base[:2000], dram=430_000, grow_to=4000) as index:
        with held(life, "renew"):
            index.add(base[2000:])
            index.commit()
            index.add(away)
            index.commit()
        while index.stats()["renewal"] != "none":
            wait_until(index, "ready")
            index.commit()
        assert index.search(away[-5:], 10, recall=0.9).stats["escalated"] == "wider"
        assert index.search(base[:100], 10, recall=0.9).stats["escalated"] == "no"


@pytest.mark.parametrize("strings", [False, True])
def test_changes_while_parts_are_joined_are_carried_over(tmp_path, monkeypatch, held, strings):
    monkeypatch.setattr(life, "_FEW_ROWS", 1)
    model = Model(tmp_path / "index", strings, 400)
    with model.index as index:
        with held(life, "join") as begun:
            model.add(250)
            index.commit(compact=False)
            assert begun == [1]
            for _ in range(3):
                model.change(40)
                index.commit(compact=False)
                assert holds(index, model.rows)
        parts, deadline = index.stats()["parts"], time.monotonic() + 600
        while index.stats()["parts"] >= parts:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            index.commit(compact=False)
        assert holds(index, model.rows)
        assert index.check() == []
    with ZoomIndex.open(tmp_path / "index", verify="open") as index:
        assert holds(index, model.rows)


def test_the_next_commit_tells_of_a_failure_beside_it(tmp_path, monkeypatch, renewed):
    model = Model(tmp_path / "index", False, 500)

    def fails(*arguments):
        raise OSError(28, "No space left on device")

    with model.index as index:
        with monkeypatch.context() as patch:
            patch.setattr(life, "renew", fails)
            model.add(200)
            index.commit()
            wait_until(index, "ready")
            model.change(4)
            with pytest.warns(UserWarning, match=r"beside its commits: OSError\(28.*compact\(\)"):
                index.commit()
            assert "No space left" in index.stats()["renewal"]
            assert holds(index, model.rows)
        index.commit()  # not told again, nor tried again for nothing
        assert "No space left" in index.stats()["renewal"]
        model.change(100)
        index.commit()
        assert index.stats()["renewal"] in ("running", "ready", "none")
        renewed(index)
        assert index.stats()["calibrated_vectors"] > 500
        assert holds(index, model.rows)


def test_an_index_that_is_closed_is_made_anew_by_the_next_to_open_it(tmp_path, held, renewed):
    model = Model(tmp_path / "index", True, 500)
    with model.index as index, held(life, "renew"):
        model.add(200)
        index.commit()
        threading.Timer(0.2, index.close).start()
        time.sleep(0.3)
    assert threads() == []
    assert os.listdir(tmp_path / "index" / "tmp") == []
    with ZoomIndex.open(tmp_path / "index", writable=True) as index:
        assert index.stats()["renewal"] == "due"
        assert holds(index, model.rows)
        renewed(index)
        assert index.stats()["renewal"] == "none"
        assert holds(index, model.rows)


def test_an_index_that_is_let_go_of_ends_its_threads(tmp_path, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    def slowly(*arguments):
        begun.set()
        try:
            while True:
                pause()
                time.sleep(0.001)
        finally:
            ended.set()

    monkeypatch.setattr(life, "renew", slowly)
    model = Model(tmp_path / "index", False, 300)
    model.add(200)
    model.index.commit()
    assert begun.wait(600)
    del model
    gc.collect()
    assert ended.wait(600)


def test_a_fork_closes_its_index_without_the_threads(tmp_path, held):
    model = Model(tmp_path / "index", False, 500)
    with model.index as index:
        with held(life, "renew"):
            model.add(200)
            index.commit()
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    index.search(make(1)[0], 3)
                    index.close()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        wait_until(index, "ready")
        index.commit()
        assert holds(index, model.rows)


def test_a_commit_that_cannot_take_over_leaves_all_as_it_was(tmp_path, monkeypatch, held, renewed):
    model = Model(tmp_path / "index", False, 500)
    with model.index as index:
        with held(life, "renew"):
            model.add(200)
            index.commit()
            model.add(30)
            index.commit()
        wait_until(index, "ready")
        model.change(20)

        def fails(*arguments):
            raise InterruptedError("stopped")

        with monkeypatch.context() as patch:
            patch.setattr(life, "write_recoded", fails)
            with pytest.raises(InterruptedError):
                index.commit()
        assert holds(index, model.rows)
        assert os.listdir(tmp_path / "index" / "tmp") == []
        index.commit()
        assert holds(index, model.rows)
        renewed(index)
        assert holds(index, model.rows)
        assert index.check() == []


def test_work_under_way_does_not_undo_tuning(tmp_path, held):
    model = Model(tmp_path / "index", False, 500)
    with model.index as index:
        with held(life, "renew"):
            model.add(200)
            index.commit()
        index.tune(make(100, seed=5))
        tuned = index.stats()["calibrated_vectors"]
        assert index.stats()["renewal"] == "none"
        model.change(5)
        index.commit()
        assert index.stats()["calibrated_vectors"] == tuned
        assert threads() == []


def test_a_join_gives_way_to_vectors(tmp_path, monkeypatch):
    """A join may hold all that is left of the budget; vectors are added all the same."""
    begun = threading.Event()

    def slowly(*arguments):
        begun.set()
        while True:
            pause()
            time.sleep(0.001)

    monkeypatch.setattr(life, "join", slowly)
    monkeypatch.setattr(life, "_FEW_ROWS", 1)
    monkeypatch.setattr(
        beside.Renewals, "planned_bytes", property(lambda renewals: (8 << 20) if renewals.joining else 0)
    )
    model = Model(tmp_path / "index", False, 400)
    with model.index as index:
        model.add(250)
        index.commit(compact=False)
        assert begun.wait(100)
        model.change(40)
        assert holds(index, model.rows)


def test_dram_of_a_join_is_no_lack_of_room(tmp_path, monkeypatch):
    free, begun, ended, join = threading.Event(), [], [], life.join

    def held(task):
        begun.append(1)
        while not free.is_set():
            pause()
            time.sleep(0.005)
        made = join(task)
        ended.append(1)
        return made

    monkeypatch.setattr(life, "join", held)
    monkeypatch.setattr(life, "_FEW_ROWS", 1)
    vectors = make(4000)
    with ZoomIndex.build(tmp_path / "index", vectors[:3000], dram="4MiB", grow_to=6000) as index:
        while not begun:
            index.add(vectors[len(index) : len(index) + 50])
            index.commit()
        monkeypatch.setattr(beside.Renewals, "planned_bytes", property(lambda self: self.joining << 30))
        index.remove(np.arange(200))
        index.commit()
        free.set()
        while threads():
            time.sleep(0.005)
        index.commit()
        assert begun == ended == [1]
        assert index.stats()["planned_bytes"] <= 4 << 20


def test_a_commit_waits_little_for_a_renewal_that_it_begins(tmp_path, monkeypatch, held):
    waited = []
    monkeypatch.setattr(beside.Beside, "give_way", lambda self, seconds: waited.append(seconds) or seconds)
    with ZoomIndex.build(tmp_path / "index", make(500), dram="8MiB", grow_to=2000) as index:
        index.add(make(200, seed=1, shift=3.0))
        monkeypatch.setattr(beside.Caller, "working", lambda self: contextlib.nullcontext(setattr(self, "owes", 1e3)))
        with held(life, "renew"):
            index.commit()  # begins it
            assert max(waited) < 1
            index.add(make(10, seed=2))
            index.commit()
            assert max(waited) > 1e3

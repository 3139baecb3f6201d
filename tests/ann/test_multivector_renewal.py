"""An index of items is made anew beside its commits, while it goes on changing."""

import os
import threading
import time
import warnings

import numpy as np
import pytest

from memhier.ann import MultiVectorIndex
from memhier.ann.multivector import writer

DIMENSION = 8


def item_of(name, version):
    """Return the tokens of an item, near one of seven places."""
    rng = np.random.default_rng([name, version])
    return (rng.normal(size=(int(rng.integers(1, 9)), DIMENSION)) + 3 * (name % 7)).astype(np.float32)


class Model:
    """An index beside a dict of the versions of its items."""

    def __init__(self, path, strings, count):
        self.strings, self.versions, self.next, self.rng = strings, {}, 0, np.random.default_rng(5)
        numbers = self._more(count)
        self.index = MultiVectorIndex.build(
            path, self._items(numbers), self.names(numbers), attributes=self._thirds(numbers),
            documents=self._texts(numbers), dram="12MiB", grow_to=6 * count,
        )  # fmt: skip

    def names(self, numbers):
        """Return ids."""
        return [f"name{number}" if self.strings else number for number in numbers]

    def _more(self, count):
        numbers = [*range(self.next, self.next + count)]
        self.next += count
        self.versions |= dict.fromkeys(numbers, 0)
        return numbers

    def _items(self, numbers):
        return [item_of(number, self.versions[number]) for number in numbers]

    def _texts(self, numbers):
        return {"text": [f"item {number} of version {self.versions[number]}" for number in numbers]}

    @staticmethod
    def _thirds(numbers):
        return {"third": [number % 3 for number in numbers]}

    def add(self, count):
        """Add some."""
        numbers = self._more(count)
        self.index.add(self._items(numbers), self.names(numbers), self._thirds(numbers), self._texts(numbers))

    def change(self, count):
        """Add some, update some and remove some, old ones and new ones."""
        self.add(count)
        some = self.rng.permutation(list(self.versions))[: 2 * count].tolist()
        changed, gone = some[:count], some[count:]
        self.versions |= {number: self.versions[number] + 1 for number in changed}
        self.index.update(self.names(changed), self._items(changed), documents=self._texts(changed))
        self.index.remove(self.names(gone))
        for number in gone:
            del self.versions[number]

    def assert_held_by(self, index):
        """Check that an index holds just these items, finds and filters them."""
        numbers = list(self.versions)
        assert len(index) == len(numbers)
        for found, item in zip(index.reconstruct(self.names(numbers)), self._items(numbers), strict=True):
            assert np.array_equal(found, item)
        assert list(index.fetch(self.names(numbers))["text"]) == self._texts(numbers)["text"]
        query = item_of(numbers[-1], self.versions[numbers[-1]])[:3].astype(np.float64)
        scores = {
            name: (query @ item.astype(np.float64).T).max(1).sum()
            for number, name, item in zip(numbers, self.names(numbers), self._items(numbers), strict=True)
            if number % 3 == 1
        }
        found = index.search(query, 5, recall=1.0, where="third == 1")
        assert np.allclose(found.scores, sorted(scores.values(), reverse=True)[:5], rtol=1e-4)
        assert np.allclose([scores[name] for name in found.ids.tolist()], found.scores, rtol=1e-4)


def wait_until(index, stands):
    deadline = time.monotonic() + 600
    while index.stats()["renewal"] != stands:
        assert time.monotonic() < deadline, index.stats()
        time.sleep(0.005)


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("items-")]


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("few", [1, 10_000])
def test_changes_while_an_index_is_made_anew_are_carried_over(tmp_path, monkeypatch, held, renewed, strings, few):
    """With `few` tokens that a commit takes on, what came meanwhile is made up for beside others, in rounds."""
    monkeypatch.setattr(writer, "_FEW_TOKENS", few)
    monkeypatch.setattr(writer, "_TOKENS_TIMES", 0)
    model = Model(tmp_path / "index", strings, 300)
    with model.index as index, MultiVectorIndex.open(tmp_path / "index") as reader:
        lists = index.stats()["lists"]
        with held(writer, "renew_items") as begun:
            model.add(200)
            index.commit()
            assert begun == [1]
            for _ in range(4):
                assert index.stats()["renewal"] == "running"
                model.change(30)
                index.commit()
                model.assert_held_by(index)
            model.change(30)
        rounds = 0
        while index.stats()["lists"] == lists:
            wait_until(index, "ready")
            model.change(3)
            model.assert_held_by(index)
            index.commit()
            model.assert_held_by(index)
            rounds += 1
        assert (rounds > 1) == (few == 1)
        renewed(index)
        stats = index.stats()
        assert stats["calibrated"]
        assert stats["memory_bytes"] <= stats["planned_bytes"] <= stats["dram"]
        assert reader.refresh()
        model.assert_held_by(reader)
        assert index.check() == []
    assert os.listdir(tmp_path / "index" / "tmp") == []
    assert threads() == []
    with MultiVectorIndex.open(tmp_path / "index", verify="open") as index:
        model.assert_held_by(index)


def test_all_items_of_parts_that_are_made_anew_may_go(tmp_path, held, renewed):
    model = Model(tmp_path / "index", False, 300)
    with model.index as index:
        with held(writer, "renew_items"):
            model.add(200)
            index.commit()
            old = list(model.versions)
            model.add(20)
            index.remove(model.names(old))
            for number in old:
                del model.versions[number]
            index.commit()
            model.assert_held_by(index)
        renewed(index)
        model.assert_held_by(index)
        assert index.check() == []


def test_the_next_commit_tells_of_a_failure_beside_it(tmp_path, monkeypatch, renewed):
    model = Model(tmp_path / "index", False, 300)

    def fails(*arguments):
        raise OSError(28, "No space left on device")

    with model.index as index:
        with monkeypatch.context() as patch:
            patch.setattr(writer, "renew_items", fails)
            model.add(200)
            index.commit()
            wait_until(index, "ready")
            model.change(4)
            with pytest.warns(UserWarning, match=r"beside its commits: OSError\(28.*compact\(\)"):
                index.commit()
            assert "No space left" in index.stats()["renewal"]
            model.assert_held_by(index)
        model.change(60)
        before = index.stats()["lists"]
        index.commit()
        renewed(index)
        assert index.stats()["lists"] != before
        model.assert_held_by(index)


def test_an_index_that_is_closed_is_made_anew_by_the_next_to_open_it(tmp_path, held, renewed):
    model = Model(tmp_path / "index", True, 300)
    with model.index as index, held(writer, "renew_items"):
        model.add(200)
        index.commit()
        threading.Timer(0.2, index.close).start()
        time.sleep(0.3)
    assert threads() == []
    assert os.listdir(tmp_path / "index" / "tmp") == []
    with MultiVectorIndex.open(tmp_path / "index", writable=True) as index:
        assert index.stats()["renewal"] == "due"
        model.assert_held_by(index)
        renewed(index)
        assert index.stats()["renewal"] == "none"
        model.assert_held_by(index)
    with MultiVectorIndex.open(tmp_path / "index") as reader:
        assert reader.stats()["renewal"] == "none"


def test_tuning_and_compaction_end_the_work_beside_them(tmp_path, held):
    model = Model(tmp_path / "index", False, 300)
    with model.index as index:
        with held(writer, "renew_items"):
            model.add(200)
            index.commit()
        index.tune([np.tile(item_of(number, 9), (4, 1))[:4] for number in range(200)])  # 128 of one class
        assert threads() == []
        assert index.stats()["renewal"] == "due"  # not "ready": it would undo the tuning
        model.assert_held_by(index)
        index.compact()
        assert index.stats()["renewal"] == "none"
        model.assert_held_by(index)


@pytest.mark.parametrize("starts", [0, 1])
def test_a_thread_that_cannot_start_leaves_nothing_behind(tmp_path, monkeypatch, held, renewed, starts):
    """The thread of the renewal, or the one that makes up for newer parts."""
    monkeypatch.setattr(writer, "_FEW_TOKENS", 1)
    monkeypatch.setattr(writer, "_TOKENS_TIMES", 0)
    model, begun, start = Model(tmp_path / "index", False, 300), [], threading.Thread.start

    def starts_some(thread):
        if thread.name.startswith("items-"):
            if len(begun) >= starts:
                raise RuntimeError("can't start new thread")
            begun.append(thread)
        start(thread)

    with model.index as index:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", starts_some)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                with held(writer, "renew_items"):
                    model.add(200)
                    index.commit()
                    model.add(5)
                    index.commit()
                if starts:
                    wait_until(index, "ready")
                    model.add(5)
                    index.commit()
            assert ["can't start new thread" in str(each.message) for each in told] == [True]
            assert "can't start new thread" in index.stats()["renewal"]
        assert os.listdir(tmp_path / "index" / "tmp") == []
        model.change(60)
        index.commit()
        renewed(index)
        model.assert_held_by(index)
        assert index.check() == []

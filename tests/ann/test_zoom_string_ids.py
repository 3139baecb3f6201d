"""Ids that are strings: an index that changes, step by step beside a dict, and what it refuses."""

import gc
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memhier.ann import ZoomIndex
from memhier.ann.zoom.ids.stored_texts import write_texts
from memhier.ann.zoom.ids.texts import as_texts, hash_texts
from memhier.ann.zoom.renewal import merge, room
from memhier.ann.zoom.storage import ids as ids_module
from memhier.ann.zoom.storage import layout, part
from memhier.ann.zoom.storage.catalog import KIND, Description
from memhier.errors import BudgetError
from memhier.store.store import Store

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
DIMENSION = 5
COUNTS = st.sampled_from([0, 1, 3, 17, 97])
RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(300, DIMENSION)).astype(np.float32)
NAMES = [f"doc/{row * 7919 % 1000}" for row in range(300)]


@cache
def text_of(number: int) -> str:
    """Return one of 4,000 strings: of one byte to a thousand, some of several bytes a letter."""
    rng = np.random.default_rng(number)
    letters = "abcé漢🙂\0 /\n"
    size = int(rng.choice([0, 1, 8, 30, 250]))
    return f"{number:x}" + "".join(letters[i] for i in rng.integers(0, len(letters), size))


def narrow(texts):
    """Hash to twelve bits, so that different strings often have one hash."""
    return hash_texts(texts) & 4095


class Life(RuleBasedStateMachine):
    """The model maps a string to its vector."""

    @initialize(seed=st.integers(0, 2**31), count=st.sampled_from([1, 3, 97, 200]))
    def build(self, seed, count):
        self.patch = pytest.MonkeyPatch()
        for module in (ids_module, part):
            self.patch.setattr(module, "hash_texts", narrow)
        self.patch.setattr(layout, "_FRESH_MOST", 6000)
        self.patch.setattr(layout, "_VECTORS_PER_LIST", 20)
        self.patch.setattr(merge, "_CHUNK_BYTES", 700)
        self.folder = Path(tempfile.mkdtemp(dir=FAST))
        self.rng = np.random.default_rng(seed)
        self.rows: dict[str, np.ndarray] = {}
        names, vectors = self.unknown(count), self.make(count)
        self.index = ZoomIndex.build(self.folder / "index", vectors, ids=names, dram="8MiB", seed=seed % 100)
        self.rows.update(zip(names, vectors, strict=True))
        self.committed = dict(self.rows)
        self.copies = 0

    def make(self, count):
        return self.rng.integers(-8, 9, (count, DIMENSION)).astype(np.float32)

    def hashes(self, names):
        return set(narrow(as_texts(list(names))).tolist()) if names else set()

    def unknown(self, count):
        """Return strings that an index with these may take: none with a hash that is there."""
        taken, names = self.hashes(self.rows), []
        for number in self.rng.permutation(4000).tolist():
            name = text_of(number)
            if len(names) < count and not self.hashes([name]) & taken:
                names.append(name)
                taken |= self.hashes([name])
        return names

    def some(self, count):
        names = sorted(self.rows)
        return [names[i] for i in self.rng.permutation(len(names))[:count]]

    @rule(count=COUNTS, objects=st.booleans())
    def add(self, count, objects):
        names, vectors = self.unknown(count), self.make(count)
        found = self.index.add(vectors[: len(names)], ids=np.array(names, object) if objects else names)
        assert found.tolist() == names
        self.rows.update(zip(names, vectors, strict=False))

    @rule(count=COUNTS)
    def remove(self, count):
        names = self.some(count)
        self.index.remove(names)
        for name in names:
            del self.rows[name]

    @rule(count=COUNTS)
    def update(self, count):
        names = self.some(count)
        vectors = self.make(len(names))
        self.index.update(names, vectors)
        self.rows.update(zip(names, vectors, strict=True))

    @rule(fully=st.booleans())
    def commit(self, fully):
        if fully:
            self.index.compact()
        else:
            self.index.commit()
        self.committed = dict(self.rows)
        with Store.open(self.folder / "index", kind=KIND) as store:
            about, names = Description.decode(store.get("index"), store.path), store.segments()
        parts = {name.removesuffix("-texts") for name in names if name.endswith("-texts")}
        assert parts == {entry["name"] for entry in about.parts}

    @rule(verify=st.sampled_from(["read", "open", "off"]))
    def reopen(self, verify):
        self.index.close()
        self.rows = dict(self.committed)
        self.index = ZoomIndex.open(self.folder / "index", writable=True, verify=verify)
        assert self.index.check() == []

    @rule()
    def read_elsewhere(self):
        self.copies += 1
        copy = self.folder / f"copy{self.copies}"
        self.index.save_to(copy)
        with ZoomIndex.open(copy) as other:
            assert len(other) == len(self.committed)
            self.holds(other, self.committed)
        shutil.rmtree(copy)

    def holds(self, index, rows):
        expected = np.reshape(list(rows.values()), (-1, DIMENSION))
        np.testing.assert_array_equal(index.reconstruct(list(rows)), expected)

    @rule(k=st.sampled_from([1, 3, 40]), queries=st.sampled_from([1, 3]))
    def search(self, k, queries):
        k, asked = min(k, max(1, len(self.rows))), self.make(queries)
        result = self.index.search(asked, k, recall=1.0)
        kept = min(k, len(self.rows))
        assert (result.ids[:, kept:] == np.array(None)).all()
        vectors = np.reshape(list(self.rows.values()), (-1, DIMENSION))
        for row, query in enumerate(asked):
            names = result.ids[row, :kept].tolist()
            assert len(set(names)) == kept
            away = [float(np.square(self.rows[name] - query).sum()) for name in names]
            assert away == result.distances[row, :kept].tolist()
            assert away == np.sort(np.square(vectors - query).sum(axis=1))[:kept].tolist()

    @rule(radius=st.sampled_from([0.0, 100.0, 300.0]))
    def range_search(self, radius):
        query = self.make(2)
        found = self.index.range_search(query, radius, recall=1.0)
        for row, (low, high) in enumerate(zip(found.offsets, found.offsets[1:], strict=False)):
            near = {name for name, vector in self.rows.items() if np.square(vector - query[row]).sum() <= radius}
            assert len(near) == high - low
            assert set(found.ids[low:high].tolist()) == near

    @rule()
    def iterate(self):
        names = [name for batch in self.index.search_iter(self.make(1)[0], 30, recall=1.0) for name in batch.ids]
        assert sorted(names) == sorted(self.rows)

    def clashing(self):
        """Return two strings of one hash, neither of which is in the index."""
        seen, taken = {}, self.hashes(self.rows)
        for number in self.rng.permutation(4000).tolist():
            (key,) = self.hashes([text_of(number)])
            if seen.get(key, text_of(number)) != text_of(number) and key not in taken:  # two numbers may share a string
                return seen[key], text_of(number)
            seen[key] = text_of(number)
        raise AssertionError("twelve bits of hash tell 4,000 strings apart")

    @rule()
    def stranger_of_a_known_hash(self):
        """A string that is not there, but whose hash is, is refused and found nowhere."""
        taken = self.hashes(self.rows)
        strangers = (text_of(number) for number in self.rng.permutation(4000).tolist())
        name = next((each for each in strangers if each not in self.rows and self.hashes([each]) & taken), None)
        if name is None:
            return
        before = self.index.stats()
        assert name not in self.index
        with pytest.raises(ValueError, match="the same 63-bit hash"):
            self.index.add(self.make(1), ids=[name])
        with pytest.raises(KeyError, match="not in the index"):
            self.index.remove([*self.some(97), name])
        with pytest.raises(KeyError, match="not in the index"):
            self.index.update([name], self.make(1))
        with pytest.raises(KeyError, match="not in the index"):
            self.index.reconstruct([*self.some(97), name])
        one, other = self.clashing()
        with pytest.raises(ValueError, match="the same 63-bit hash"):
            self.index.add(self.make(2), ids=[one, other])
        with pytest.raises(ValueError, match="the same 63-bit hash"):
            ZoomIndex.build(self.folder / "none", self.make(3), ids=[one, "a", other], dram="8MiB")
        with pytest.raises(ValueError, match="more than once"):
            self.index.add(self.make(3), ids=[one, other, one])
        after = self.index.stats()
        assert all(after[each] == before[each] for each in ("vectors", "parts", "planned_bytes", "file_bytes"))

    @invariant()
    def same(self):
        if hasattr(self, "index"):
            assert len(self.index) == len(self.rows)
            assert self.index.memory_bytes <= 8 << 20
            names = self.some(5)
            self.holds(self.index, {name: self.rows[name] for name in names})
            assert all(name in self.index for name in names)

    def teardown(self):
        if hasattr(self, "patch"):  # also after a build that failed
            self.patch.undo()
        if hasattr(self, "index"):
            self.index.close()
            shutil.rmtree(self.folder)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=8,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    report_multiple_bugs=False,
)


def generation_of(path):
    with Store.open(path, kind=KIND) as store:
        return store.generation


@pytest.fixture
def index(tmp_path):
    with ZoomIndex.build(tmp_path / "index", VECTORS, ids=NAMES, dram="4MiB") as made:
        yield made


@pytest.mark.parametrize(
    "ids",
    [
        NAMES,
        tuple(NAMES),
        np.array(NAMES),
        np.array(NAMES, object),
        np.array(NAMES, np.dtypes.StringDType()),
        np.array(NAMES)[::-1][::-1],
    ],
    ids=["list", "tuple", "unicode", "object", "StringDType", "strided"],
)
@pytest.mark.parametrize("preview", ["rabitq", "pq"])
def test_strings_of_any_container(tmp_path, ids, preview):
    with ZoomIndex.build(tmp_path / "index", VECTORS, ids=ids, dram="4MiB", preview=preview) as index:
        assert index.search(VECTORS, 1, candidates=50, nprobe=100).ids[:, 0].tolist() == NAMES
        assert index.stats()["id_kind"] == "str"


def test_a_column_of_arrow(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    with ZoomIndex.build(tmp_path / "index", VECTORS, ids=arrow.array(NAMES), dram="4MiB") as index:
        assert index.search(VECTORS[3], 1).ids[0] == NAMES[3]


def test_shapes_and_kinds_of_results(index):
    single, batch = index.search(VECTORS[0], 3), index.search(VECTORS[:7], 3)
    assert single.ids.shape == (3,)
    assert batch.ids.shape == (7, 3)
    assert batch.ids.dtype == object
    assert single.ids[0] == NAMES[0]
    assert type(single.ids[0]) is str
    assert index.search(np.empty((0, DIMENSION)), 3).ids.shape == (0, 3)
    assert index.range_search(VECTORS[0], -1.0).ids.tolist() == []
    assert index.reconstruct([]).shape == (0, DIMENSION)
    assert index.add(np.empty((0, DIMENSION)), ids=[]).tolist() == []


def test_an_id_may_be_asked_for_twice_in_reconstruct(index):
    np.testing.assert_array_equal(index.reconstruct([NAMES[5], NAMES[2], NAMES[5]]), VECTORS[[5, 2, 5]])
    np.testing.assert_array_equal(index.reconstruct(np.array([NAMES[5], NAMES[5]])), VECTORS[[5, 5]])


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        (["a", ""], ValueError, r"ids\[1\]='' has 0 bytes"),
        (["a", "é" * 513], ValueError, "has 1026 bytes of UTF-8: expected 1 to 1,024"),
        (["a", "\ud800"], ValueError, r"UTF-8 cannot hold it"),
        (["a", "a"], ValueError, "holds 'a' more than once"),
        (["a", 3], TypeError, r"ids\[1\]=3: expected a string"),
        (["a", None], TypeError, r"ids\[1\]=None"),
        ([["a", "b"]], TypeError, "expected"),
        (np.array([["a"], ["b"]]), TypeError, "expected strings of shape"),
        (np.array([b"a", b"b"]), TypeError, "expected"),
        ([3, 4], TypeError, "this index has strings as ids"),
        (np.array([3, 4]), TypeError, "this index has strings as ids"),
        (["a"], ValueError, "ids has 1 entry for 2 vectors"),
        (["a", NAMES[7]], ValueError, f"{NAMES[7]!r}, which is in the index already"),
        (None, ValueError, "ids=None: this index has strings"),
    ],
)
def test_refused_ids_change_nothing(index, tmp_path, ids, error, words):
    before = generation_of(tmp_path / "index")
    with pytest.raises(error, match=words):
        index.add(VECTORS[:2] + 1, ids=ids)
    assert len(index) == len(NAMES)
    index.commit()  # of nothing
    assert generation_of(tmp_path / "index") == before


def test_the_longest_string_is_taken(index):
    longest = ["x" * 1024, "é" * 512, "漢" * 341]
    index.add(VECTORS[:3] + 20, ids=longest)
    index.commit()
    assert index.search(VECTORS[:3] + 20, 1).ids[:, 0].tolist() == longest


def test_kinds_do_not_mix(tmp_path, index):
    for call in (index.remove, index.reconstruct, lambda ids: index.update(ids, VECTORS[:1])):
        with pytest.raises(TypeError, match="strings as ids"):
            call([3])
    with pytest.raises(TypeError, match="strings as ids"):
        assert 3 in index
    with ZoomIndex.build(tmp_path / "numbers", VECTORS, dram="4MiB") as numbers:
        assert numbers.stats()["id_kind"] == "int64"
        for call in (
            numbers.remove,
            numbers.reconstruct,
            lambda ids: numbers.update(ids, VECTORS[:1]),
            lambda ids: numbers.add(VECTORS[:1], ids=ids),
        ):
            with pytest.raises(TypeError, match="integers as ids"):
                call(["a"])
        with pytest.raises(TypeError, match="integers as ids"):
            assert "a" in numbers
        assert 7 in numbers
        assert np.int64(299) in numbers
        assert 300 not in numbers
        assert -1 not in numbers
        numbers.remove(7)
        assert 7 not in numbers


def test_membership(index):
    assert NAMES[3] in index
    assert "doc/" not in index
    assert "" not in index
    assert "x" * 2000 not in index
    index.remove(NAMES[3])
    assert NAMES[3] not in index
    index.add(VECTORS[3], ids="doc/new")
    assert "doc/new" in index


def test_with_filters_and_attributes(tmp_path):
    columns = {"row": list(range(300))}
    with ZoomIndex.build(tmp_path / "index", VECTORS, ids=NAMES, attributes=columns, dram="4MiB") as index:
        found = index.search(VECTORS[:2], 5, where="row >= 297", recall=1.0).ids
        assert [set(row) for row in found.tolist()] == [{*NAMES[297:], None}] * 2
        index.add(VECTORS[:1] + 5, ids=["late"], attributes={"row": [900]})
        index.compact()
        assert index.search(VECTORS[0], 1, where="row == 900").ids.tolist() == ["late"]


@pytest.mark.parametrize("ids", [NAMES, range(-400, -100)], ids=["strings", "negative"])
def test_a_filtered_iterator_gives_each_id_and_no_other(tmp_path, ids):
    columns = {"row": list(range(300))}
    with ZoomIndex.build(tmp_path / "index", VECTORS, ids=list(ids), attributes=columns, dram="4MiB") as index:
        batches = index.search_iter(VECTORS[0], 3, where="row < 7", recall=1.0)
        assert sorted(name for batch in batches for name in batch.ids.tolist()) == sorted(ids[:7])


def test_files_of_strings_are_closed_with_their_parts(index):
    for round_ in range(3):
        index.add(VECTORS + round_, ids=[f"{round_}/{row}" for row in range(300)])
        index.commit()
    index.compact()
    gc.collect()
    index.search(VECTORS[0], 1)
    assert index.stats()["parts"] == 1
    assert index.stats()["files"] == 2  # vectors and strings


def test_waiting_strings_are_counted_and_do_not_outgrow_the_budget(tmp_path):
    with ZoomIndex.build(tmp_path / "index", VECTORS, ids=NAMES, dram="4MiB") as index:
        before = index.memory_bytes
        index.add(VECTORS[:10] + 1, ids=[f"{row}" + "x" * 1000 for row in range(10)])
        assert index.memory_bytes - before >= 10 * 1001
        index.add(VECTORS + 2, ids=[f"-{row}" + "y" * 1000 for row in range(300)])  # more than may wait
        assert index.stats()["parts"] > 1
        assert index.memory_bytes <= 4 << 20
        with pytest.raises(BudgetError):
            index.add(np.zeros((300_000, DIMENSION)), ids=[f"{row}" for row in range(300_000)])


@pytest.mark.parametrize("module", [layout, room])
def test_pages_of_strings_are_charged_before_they_are_written(tmp_path, monkeypatch, module):
    """Were the DRAM of one page as large as the budget, an index of integers would still fit."""
    options = {"vectors": VECTORS, "ids": NAMES, "dram": "4MiB"}
    with ZoomIndex.build(tmp_path / "index", **options) as index:
        monkeypatch.setattr(module, "PAGE_DRAM", 4 << 20)
        with pytest.raises(BudgetError, match="more vectors need" if module is room else "is too small"):
            index.add(VECTORS[:1], ids=["one"]) if module is room else ZoomIndex.build(tmp_path / "other", **options)
    with ZoomIndex.build(tmp_path / "numbers", VECTORS, dram="4MiB") as index:
        index.add(VECTORS[:1])


def test_check_finds_strings_of_other_rows(tmp_path, index):
    assert index.check() == []
    index.close()
    with Store.open(tmp_path / "index", kind=KIND, writable=True) as store:
        with store.begin() as tx:
            tx.drop("p0-texts")
            tx.drop("p0-texts-rows")
            tx.commit()
        with store.begin() as tx:
            write_texts(tx, "p0-texts", [as_texts(NAMES)])  # not in the order of the lists
            tx.commit()
    with ZoomIndex.open(tmp_path / "index") as damaged:
        (problem,) = damaged.check()
        assert "part p0" in problem
        assert "ids are not those of their rows" in problem

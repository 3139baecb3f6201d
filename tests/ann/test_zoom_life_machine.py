"""An index that changes, step by step beside a dict of vectors that is searched by brute force."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memhier.ann import ZoomIndex
from memhier.ann.zoom.renewal import merge
from memhier.ann.zoom.storage import layout
from memhier.ann.zoom.storage.catalog import KIND, Description
from memhier.errors import BudgetError
from memhier.store.store import Store

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
DIMENSION = 5
LANGS = ["de", "en", None]
FILTERS = {
    "price < 10": lambda price, lang: price is not None and price < 10,
    "lang == 'en' or price == 3": lambda price, lang: lang == "en" or price == 3,
    "lang is null": lambda price, lang: lang is None,
    "not (price between 2 and 17)": lambda price, lang: price is not None and not 2 <= price <= 17,
}

seeds = st.integers(0, 2**31)
counts = st.sampled_from([0, 1, 3, 17, 97])


def stored(path):
    """Return the description that was committed last, and the names of all segments."""
    with Store.open(path, kind=KIND) as store:
        return Description.decode(store.get("index"), store.path), sorted(store.segments())


@pytest.fixture(autouse=True, scope="module")
def small_sizes():
    """Make everything that is done at some size happen all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_FRESH_MOST", 1500)
        patch.setattr(layout, "_VECTORS_PER_LIST", 20)
        patch.setattr(merge, "_CHUNK_BYTES", 700)
        yield


def exact(vectors, queries, metric):
    rows, asked = vectors.astype(np.float64), queries.astype(np.float64)
    if metric == "l2":
        return np.square(asked[:, None] - rows[None]).sum(axis=2)
    inner = asked @ rows.T
    if metric == "ip":
        return -inner
    norms = np.linalg.norm(asked, axis=1)[:, None] * np.linalg.norm(rows, axis=1)
    return 1 - np.divide(inner, norms, out=np.zeros_like(inner), where=norms > 0)


class Life(RuleBasedStateMachine):
    """The model maps an id to its vector, price and language."""

    @initialize(
        seed=seeds,
        count=st.sampled_from([1, 3, 97, 300]),
        metric=st.sampled_from(["l2", "ip", "cosine"]),
        dtype=st.sampled_from(["float32", "float16", "int8", "uint8"]),
        attributed=st.booleans(),
    )
    def build(self, seed, count, metric, dtype, attributed):
        self.folder = Path(tempfile.mkdtemp(dir=FAST))
        self.metric, self.dtype = metric, np.dtype(dtype)
        self.rng = np.random.default_rng(seed)
        vectors = self.make(count)
        vectors[0] = 9  # the largest norm there is to be
        ids = np.arange(count)
        if seed % 2:
            ids = self.rng.permutation(np.setdiff1d(np.arange(-3 * count, 7 * count), [-1]))[:count]
        self.attributed = attributed
        columns = self.columns(count)
        self.index = ZoomIndex.build(
            self.folder / "index", vectors, ids=ids, metric=metric, dram="8MiB", attributes=columns, seed=seed % 100
        )
        self.rows: dict = {}
        self.store(ids, vectors, columns)
        self.committed = dict(self.rows)
        self.next_id = max(ids.max() + 1, 0)
        self.copies = 0

    def make(self, count):
        low = 0 if self.dtype.kind == "u" else -8
        return self.rng.integers(low, 9, (count, DIMENSION)).astype(self.dtype)

    def columns(self, count):
        if not self.attributed or not count:
            return None
        prices = self.rng.integers(0, 20, count).tolist()
        langs = [LANGS[i] for i in self.rng.integers(0, 3, count)]
        langs[0] = "de"  # a column that is null in every row has no type
        return {"price": prices, "lang": langs}

    def store(self, ids, vectors, columns):
        for row, name in enumerate(ids.tolist()):
            values = (None, None) if columns is None else (columns["price"][row], columns["lang"][row])
            self.rows[name] = (vectors[row], *values)

    def some(self, count):
        names = np.array(sorted(self.rows), np.int64)
        return self.rng.permutation(names)[:count]

    @rule(count=counts, own=st.booleans(), attributed=st.booleans())
    def add(self, count, own, attributed):
        vectors = self.make(count)
        ids = None
        if own:
            ids = self.rng.permutation(np.setdiff1d(np.arange(-900, 900), [*self.rows, -1]))[:count]
        columns = None
        if attributed:
            self.attributed = self.attributed or count > 0
            columns = self.columns(count)
        found = self.index.add(vectors, ids=ids, attributes=columns)
        expected = np.arange(self.next_id, self.next_id + count) if ids is None else ids
        np.testing.assert_array_equal(found, expected)
        self.next_id = max(self.next_id, found.max(initial=-1) + 1)
        self.store(found, vectors, columns)

    @rule(count=counts)
    def remove(self, count):
        ids = self.some(count)
        self.index.remove(ids)
        for name in ids.tolist():
            del self.rows[name]

    @precondition(lambda self: self.attributed)
    @rule(where=st.sampled_from(sorted(FILTERS)))
    def remove_by_filter(self, where):
        gone = [name for name, (_, price, lang) in self.rows.items() if FILTERS[where](price, lang)]
        assert self.index.remove(where=where) == len(gone)
        for name in gone:
            del self.rows[name]

    @precondition(lambda self: self.attributed)
    @rule(where=st.sampled_from(sorted(FILTERS)), value=st.sampled_from(["en", "new", None]))
    def update_by_filter(self, where, value):
        chosen = [name for name, (_, price, lang) in self.rows.items() if FILTERS[where](price, lang)]
        assert self.index.update(where=where, attributes={"lang": value}) == len(chosen)
        for name in chosen:
            self.rows[name] = *self.rows[name][:2], value

    @rule(count=counts)
    def update(self, count):
        ids = self.some(count)
        vectors, columns = self.make(len(ids)), self.columns(len(ids))
        self.index.update(ids, vectors, columns)
        self.store(ids, vectors, columns)

    @rule(count=counts, other=counts)
    def upsert(self, count, other):
        fresh = self.rng.permutation(np.setdiff1d(np.arange(-900, 900), [*self.rows, -1]))[:other]
        ids = self.rng.permutation(np.concatenate([self.some(count), fresh]))
        vectors, columns = self.make(len(ids)), self.columns(len(ids))
        assert self.index.upsert(ids, vectors, columns) == len(fresh)
        self.next_id = max(self.next_id, ids.max(initial=-1) + 1)
        self.store(ids, vectors, columns)

    @precondition(lambda self: self.attributed)
    @rule(count=counts)
    def update_attributes(self, count):
        ids = self.some(count)
        columns = self.columns(len(ids)) or {"price": [], "lang": []}
        self.index.update(ids, attributes=columns)
        self.store(ids, [self.rows[name][0] for name in ids.tolist()], columns)

    @rule()
    def commit(self):
        self.index.commit()
        self.committed = dict(self.rows)
        self.holds_no_more_than_its_parts()

    @rule()
    def compact(self):
        self.index.compact()
        self.committed = dict(self.rows)
        self.holds_no_more_than_its_parts()
        assert self.index.stats()["parts"] == min(len(self.rows), 1)

    def holds_no_more_than_its_parts(self):
        about, names = stored(self.folder / "index")
        assert {name.split("-")[0] for name in names if "-" in name} == {entry["name"] for entry in about.parts}
        alive = {entry["alive"] for entry in about.parts} - {None}
        assert {name for name in names if "-alive" in name} == alive
        assert len(about.parts) == self.index.stats()["parts"]
        assert about.pending == []

    @rule(verify=st.sampled_from(["read", "open", "off"]))
    def reopen(self, verify):
        self.index.close()
        self.rows = dict(self.committed)
        self.index = ZoomIndex.open(self.folder / "index", writable=True, verify=verify)
        about, _ = stored(self.folder / "index")
        self.next_id = about.next_id
        assert self.next_id > max(self.rows, default=-1)
        self.attributed = bool(about.schema)
        assert self.index.check() == []

    @rule()
    def read_elsewhere(self):
        self.copies += 1
        copy = self.folder / f"copy{self.copies}"
        self.index.save_to(copy)
        for path in (copy, self.folder / "index"):
            with ZoomIndex.open(path) as other:
                assert len(other) == len(self.committed)
                names = np.array(list(self.committed), np.int64)
                expected = [vector for vector, *_ in self.committed.values()]
                np.testing.assert_array_equal(other.reconstruct(names), np.reshape(expected, (-1, DIMENSION)))
        shutil.rmtree(copy)

    @rule(k=st.sampled_from([1, 3, 40]), queries=st.sampled_from([1, 3]))
    def search(self, k, queries):
        k = min(k, max(1, len(self.rows)))
        self.compare(list(self.rows), k, self.make(queries).astype(np.float32), None)

    @precondition(lambda self: self.attributed)
    @rule(
        k=st.sampled_from([1, 7]),
        where=st.sampled_from(sorted(FILTERS)),
    )
    def search_where(self, k, where):
        chosen = FILTERS[where]
        names = [name for name, (_, price, lang) in self.rows.items() if chosen(price, lang)]
        self.compare(names, min(k, max(1, len(self.rows))), self.make(1).astype(np.float32), where)

    def compare(self, names, k, queries, where):
        result = self.index.search(queries, k, recall=1.0, where=where)
        kept = min(k, len(names))
        assert (result.ids[:, kept:] == -1).all()
        assert (result.distances[:, kept:] == np.inf).all()
        if not kept:
            return
        expected = exact(np.stack([self.rows[name][0] for name in names]), queries, self.metric)
        place = {name: row for row, name in enumerate(names)}
        for row, away in enumerate(expected):
            found = [place[name] for name in result.ids[row, :kept].tolist()]
            assert len(set(found)) == kept
            np.testing.assert_allclose(result.distances[row, :kept], np.sort(away)[:kept], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(away[found], np.sort(away)[:kept], rtol=1e-5, atol=1e-5)
            if self.metric == "l2":  # whole numbers: ties are ties, and go by id
                order = np.lexsort((np.array(names), away))[:kept]
                assert result.ids[row, :kept].tolist() == np.array(names)[order].tolist()

    @rule(wrong=st.sampled_from(["known", "nan", "range", "attribute", "missing", "update", "budget", "count"]))
    def refused(self, wrong):
        vectors = self.make(30)
        before, held = stored(self.folder / "index"), self.index.stats()
        free = np.setdiff1d(np.arange(2000, 2100), list(self.rows))[:30]
        known = self.some(3)
        if wrong == "known" and len(known):
            free[17] = known[0]
            with pytest.raises(ValueError, match="in the index already"):
                self.index.add(vectors, ids=free)
        elif wrong == "nan" and self.dtype.kind == "f":
            vectors[17, 2] = np.nan
            with pytest.raises(ValueError, match="row 17"):
                self.index.add(vectors)
        elif wrong == "range" and self.metric == "ip":
            vectors[17] = 10
            with pytest.raises(ValueError, match="row 17 has a norm"):
                self.index.add(vectors)
        elif wrong == "attribute":
            with pytest.raises((TypeError, ValueError), match="price"):
                self.index.add(vectors, attributes={"price": ["a", 3] * 15})
        elif wrong == "missing":
            with pytest.raises(KeyError, match="5000"):
                self.index.remove([*known.tolist(), 5000])
        elif wrong == "update" and len(known):
            with pytest.raises(ValueError, match="one for each"):
                self.index.update(known, vectors)
        elif wrong == "budget":
            with pytest.raises(BudgetError, match="compact"):
                self.index.add(np.broadcast_to(vectors[:1], (10**6, DIMENSION)))
        elif wrong == "count":
            with pytest.raises(ValueError, match="30 vectors"):
                self.index.add(vectors, ids=free[:-1])
        after = self.index.stats()
        assert all(after[name] == held[name] for name in ("vectors", "parts", "planned_bytes", "file_bytes"))
        assert stored(self.folder / "index") == before

    @invariant()
    def same_size(self):
        if hasattr(self, "index"):
            assert len(self.index) == len(self.rows)
            assert self.index.memory_bytes <= 8 << 20

    @invariant()
    def same_vectors(self):
        if hasattr(self, "index"):
            names = self.some(5)
            expected = np.reshape([self.rows[name][0] for name in names.tolist()], (-1, DIMENSION))
            np.testing.assert_array_equal(self.index.reconstruct(names), expected)
            gone = np.setdiff1d(self.rng.integers(-900, 900, 5), [*self.rows, -1])
            for name in gone.tolist():
                with pytest.raises(KeyError):
                    self.index.reconstruct([name])

    def teardown(self):
        if hasattr(self, "index"):
            self.index.close()
            shutil.rmtree(self.folder)


TestLife = pytest.mark.long(Life.TestCase)
TestLife.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
    report_multiple_bugs=False,
)

"""Parts of MultiVectorIndex beside plain references: postings, codes with bounds, scores, the division of a budget."""

import os
import subprocess
import sys

import numpy as np
import pytest

from memhier import backend
from memhier.ann.multivector.coding.book import QueryTables, TokenBook, TokenCoder
from memhier.ann.multivector.coding.postings import Postings, postings_bytes
from memhier.ann.multivector.coding.scores import estimates, list_scores, max_sims, upper_bounds
from memhier.ann.multivector.storage.layout import ItemSizes, plan_items
from memhier.errors import BudgetError


@pytest.mark.parametrize("lists", [1, 3, 400])
@pytest.mark.parametrize("items", [1, 7, 9000])
def test_postings_tell_the_items_of_each_list(lists, items):
    random = np.random.default_rng([lists, items])
    starts = np.concatenate([[0], np.cumsum(random.integers(1, 5, items))])
    of = random.integers(0, max(1, lists - 1), starts[-1]).astype(np.uint16)  # the last list is empty
    made = Postings.of(of, starts, lists)
    assert made.starts.nbytes + made.gaps.nbytes <= postings_bytes(int(starts[-1]), items, lists)
    owner = np.repeat(np.arange(items), np.diff(starts))
    for wanted in [np.arange(lists), random.permutation(lists)[:5], np.array([lists - 1]), np.empty(0, np.int64)]:
        marks = np.zeros(items, np.bool_)
        made.mark(np.sort(wanted), marks)
        expected = np.zeros(items, np.bool_)
        expected[owner[np.isin(of, wanted)]] = True
        assert np.array_equal(marks, expected)


def coded_items(dimension, code_bytes, tail, seed=0, rotate=True):
    """Return a book, codes of items, where these begin, their tokens, and a query."""
    random = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(random.integers(1, 9, 150))])
    tokens = random.normal(size=(int(starts[-1]), dimension)) * np.exp(tail * random.normal(size=(int(starts[-1]), 1)))
    tokens = tokens.astype(np.float32)
    book = TokenBook.train(tokens[::2], 12, code_bytes, seed, rotate=rotate)
    query = random.normal(size=(37, dimension)).astype(np.float32)
    return book, TokenCoder(book, seed).encode(tokens), starts, tokens, query


@pytest.mark.parametrize("tail", [0.0, 1.0, 6.0])
@pytest.mark.parametrize(("dimension", "code_bytes"), [(1, 1), (12, 1), (24, 3), (24, 12), (100, 30)])
def test_no_item_exceeds_its_bound(dimension, code_bytes, tail):
    book, coded, starts, tokens, query = coded_items(dimension, code_bytes, tail, rotate=dimension != 24)
    assert coded.codes.shape == (len(tokens), book.book.code_bytes)
    assert book.book.code_bytes <= code_bytes
    tables = QueryTables(book, query)
    exact = max_sims(query, tokens, starts[:-1], starts[1:])
    upper = upper_bounds(book, tables, coded, starts[:-1], starts[1:])
    assert (upper >= exact).all()
    for some in (estimates, list_scores):
        arguments = (tables, coded, starts[:-1], starts[1:])
        found = some(book, *arguments) if some is estimates else some(*arguments)
        known = np.isfinite(found)
        assert known.mean() > 0.9
    near = estimates(book, tables, coded, starts[:-1], starts[1:])
    far = list_scores(tables, coded, starts[:-1], starts[1:])
    if tail == 0 and code_bytes > 1:
        assert np.abs(near - exact).mean() < 0.7 * np.abs(far - exact).mean()


@pytest.mark.skipif(backend.core is None, reason="there is no compiled core to compare with")
def test_both_cores_score_alike(monkeypatch):
    book, coded, starts, _, query = coded_items(40, 13, 1.0)
    coded.errors[7] = 255
    tables, some = QueryTables(book, query), np.array([3, 0, 149, 3])
    arguments = (coded, starts[:-1][some], starts[1:][some])
    listed, near = list_scores(tables, *arguments), estimates(book, tables, *arguments)
    monkeypatch.setattr(backend, "core", None)
    assert np.array_equal(list_scores(tables, *arguments), listed)
    np.testing.assert_allclose(estimates(book, tables, *arguments), near, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(backend.core is None, reason="there is no compiled core")
def test_the_kernels_refuse_what_lies_outside():
    book, coded, _, _, query = coded_items(8, 2, 0.0)
    tables, out = QueryTables(book, query[:4]), np.zeros(1, np.float32)
    table = next(tables.blocks())
    good = {"products": table.products, "lists": coded.lists, "errors": coded.errors, "out": out,
            "lows": np.array([0]), "highs": np.array([2])}  # fmt: skip
    backend.core.list_max_sims(**good)
    for bad in (
        {"highs": np.array([len(coded.lists) + 1])}, {"lows": np.array([-1])}, {"lows": np.array([3])},
        {"lists": np.full_like(coded.lists, 12)}, {"errors": coded.errors[:-1]}, {"highs": np.array([1, 2])},
        {"products": np.zeros((12, 33), np.float32)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="max_sims"):
            backend.core.list_max_sims(**good | bad)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8"])
@pytest.mark.parametrize(("vectors", "dimension"), [(1, 1), (3, 31), (16, 8), (17, 40), (70, 5)])
def test_exact_scores_are_the_sums_of_the_largest_products(monkeypatch, dtype, vectors, dimension):
    random = np.random.default_rng([vectors, dimension])
    tokens = (random.normal(size=(60, dimension)) * 40 + 100 * (dtype == "uint8")).clip(-120, 250).astype(dtype)
    tokens[20:29] = tokens[3:12]
    query = random.normal(size=(vectors, dimension)).astype(np.float32)
    lows, highs = np.array([0, 3, 59, 20, 7]), np.array([60, 12, 60, 29, 12])
    pairs = zip(lows.tolist(), highs.tolist(), strict=True)
    expected = [(tokens[low:high].astype(np.float64) @ query.T.astype(np.float64)).max(0).sum() for low, high in pairs]
    size = np.abs(query).sum() * np.abs(tokens.astype(np.float64)).max()
    for core in {backend.core, None}:
        monkeypatch.setattr(backend, "core", core)
        found = max_sims(query, tokens, lows, highs)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * size)
        assert found[1] == found[3]  # equal items, at other places
        assert max_sims(query, tokens, lows[:0], highs[:0]).shape == (0,)


@pytest.mark.skipif(backend.core is None, reason="there is no compiled core")
def test_exact_scores_refuse_what_lies_outside():
    good = {"query": np.ones((2, 3), np.float32), "tokens": np.ones((5, 3), np.float16), "dtype": 1,
            "lows": np.array([0, 4]), "highs": np.array([2, 5]), "out": np.zeros(2, np.float32)}  # fmt: skip
    backend.core.exact_max_sims(**good)
    assert good["out"].tolist() == [6, 6]
    for bad in (
        {"highs": np.array([2, 6])}, {"lows": np.array([-1, 0])}, {"lows": np.array([0, 6])}, {"dtype": 4},
        {"dtype": 0}, {"tokens": np.ones((5, 2), np.float16)}, {"lows": np.array([0])},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="exact_max_sims"):
            backend.core.exact_max_sims(**good | bad)


@pytest.mark.parametrize("dimension", [64, 128])
def test_a_tenth_of_a_hundred_megabytes_is_enough(dimension):
    items = (1 << 20) * 128 // (2 * dimension) // 32
    sizes = ItemSizes(items, 32 * items, dimension, 2, 48, 215464)
    layout = plan_items(sizes, 2 * dimension * 32 * items // 10)
    assert layout.memory_bytes <= 2 * dimension * 32 * items // 10
    assert 8 * layout.code_bytes >= dimension / 3


def test_more_dram_makes_longer_codes_and_too_little_an_error():
    sizes = ItemSizes(10_000, 300_000, 96, 4, 64, 200_000)
    found = [plan_items(sizes, dram) for dram in (5 << 20, 8 << 20, 16 << 20, 1 << 30)]
    assert [each.code_bytes for each in found] == sorted({each.code_bytes for each in found})
    assert found[-1].code_bytes == 48
    with pytest.raises(BudgetError, match="at least"):
        plan_items(sizes, 1 << 20)


@pytest.mark.long
def test_an_index_of_the_python_core_holds_the_same(tmp_path):
    code = """
import sys, numpy as np
from memhier.ann import MultiVectorIndex
random = np.random.default_rng(0)
items = [random.normal(size=(n, 16)).astype('float16') for n in random.integers(1, 20, 300)]
queries = [random.normal(size=(5, 16)) for _ in range(5)]
with MultiVectorIndex.build(sys.argv[1], items, dram='4MiB') as index:
    for recall in (0.9, 1.0):
        print(index.search(queries, 5, recall=recall).ids.tolist())
"""
    found = []
    for native in ("0", "1"):
        environment = os.environ | {"MEMHIER_NATIVE": native}
        if native == "1" and backend.core is None:
            continue
        command = [sys.executable, "-c", code, tmp_path / native]
        found.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(set(found)) == 1


def test_a_query_stands_for_the_tokens_that_it_looks_for():
    random = np.random.default_rng(3)
    centres = random.normal(size=(200, 32)) + 1.5 * random.normal(size=32)  # as of models whose tokens are all alike
    tokens = (centres[random.integers(0, 200, 6000)] + 0.2 * random.normal(size=(6000, 32))).astype(np.float32)
    tokens /= np.linalg.norm(tokens, axis=1, keepdims=True)
    book = TokenBook.train(tokens, 100, 8, 0, rotate=True)
    different = tokens[random.choice(6000, 32, replace=False)]
    copies = np.repeat(different[:1], 32, axis=0)
    opposite = np.concatenate([copies[:16], -copies[:16]])
    zeros = np.zeros((31, 32), np.float32)
    assert QueryTables(book, different).vectors >= 16
    for few in (copies, opposite, zeros, np.concatenate([different[:1], zeros])):
        assert QueryTables(book, few).vectors <= 4
    assert QueryTables(book, copies).unit == pytest.approx(32, rel=1e-4)
    assert QueryTables(book, opposite).unit == pytest.approx(32 / 2**0.5, rel=1e-4)
    assert QueryTables(book, zeros).unit == pytest.approx(0.0, abs=1e-200)

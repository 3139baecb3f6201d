"""Errors at the border of MultiVectorIndex: argument, value, expected; nothing changes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from memhier.ann import MultiVectorIndex, ZoomIndex
from memhier.errors import BudgetError, ClosedError, FormatError, LockedError

spec = importlib.util.spec_from_file_location("multivector_data", Path(__file__).with_name("multivector_data.py"))
data = importlib.util.module_from_spec(spec)
spec.loader.exec_module(data)

ONE = np.ones((2, 4), np.float32)
NAN = np.full((2, 4), np.nan, np.float32)


@pytest.mark.parametrize(
    ("items", "options", "words"),
    [
        ([ONE, np.ones((2, 5), np.float32)], {}, r"item 1 has shape \(2, 5\): expected \[tokens, 4\]"),
        ([ONE, np.ones(4, np.float32)], {}, r"item 1 has shape \(4,\)"),
        ([ONE, NAN], {}, "item 1 holds NaN or infinity"),
        ([ONE, np.full((1, 4), np.inf)], {}, "item 1 holds NaN or infinity"),
        ([ONE, np.empty((0, 4), np.float32)], {}, "item 1 has no vectors"),
        ([ONE, np.full((1, 4), 1e30, np.float32)], {}, "item 1 holds values beyond"),
        ([], {}, "items is empty"),
        ([ONE, ONE], {"ids": [3, 3]}, "ids holds 3 more than once"),
        ([ONE, ONE], {"ids": [-1, 3]}, "ids holds -1"),
        ([ONE, ONE], {"ids": [3]}, "ids has 1 entry for 2 items"),
        ([ONE], {"attributes": {"year": [1, 2]}}, "attribute 'year' has 2 values"),
        (np.ones((5, 4)), {"lengths": [2, 2]}, "lengths add up to 4: expected 5"),
        (np.ones((5, 4)), {"lengths": [6, -1]}, "none negative"),
        (np.ones((4, 4)), {"lengths": [4, 0]}, "item 1 has no vectors"),
        ([ONE], {"dram": "1KiB"}, "is too small for 1 items"),
        ([ONE], {"dram": 0}, "positive"),
        ([ONE], {"seed": -1}, "seed"),
    ],
)
def test_a_build_refuses(tmp_path, items, options, words):
    with pytest.raises(ValueError, match=words):
        MultiVectorIndex.build(tmp_path / "index", items, **{"dram": "4MiB", **options})
    assert not (tmp_path / "index").exists()


def test_a_build_refuses_types(tmp_path):
    cases = [("text", {}), (np.ones((5, 4)), {}), ([np.array([["a"]])], {}), ([ONE, ONE], {"ids": ["a", 1]}), (7, {})]
    for items, options in cases:
        with pytest.raises(TypeError):
            MultiVectorIndex.build(tmp_path / "index", items, dram="4MiB", **options)
    assert not (tmp_path / "index").exists()


def test_a_budget_named_as_enough_is_enough(tmp_path):
    items = data.drawn_items(300, 8, "float16")
    with pytest.raises(BudgetError, match="at least") as caught:
        MultiVectorIndex.build(tmp_path / "index", items, dram="100KiB")
    enough = int(str(caught.value).rsplit("(", 1)[1].split()[0])
    with MultiVectorIndex.build(tmp_path / "index", items, dram=enough) as index:
        assert index.stats()["planned_bytes"] <= enough


@pytest.fixture
def index(tmp_path):
    """Return an index of 20 items."""
    items = data.drawn_items(20, 4, "float16")
    with MultiVectorIndex.build(
        tmp_path / "index", items, attributes={"n": range(20)}, dram="4MiB", grow_to=60
    ) as made:
        yield made


@pytest.mark.parametrize(
    ("query", "options", "error", "words"),
    [
        (np.ones((2, 5)), {}, ValueError, r"query 0 has shape \(2, 5\): expected \[vectors, 4\]"),
        (np.empty((0, 4)), {}, ValueError, "query 0 has 0 vectors"),
        ([ONE, NAN], {}, ValueError, "query 1 holds NaN"),
        (np.ones(4), {}, TypeError, "expected a matrix"),
        ([np.array([["a"] * 4])], {}, TypeError, "dtype"),
        (np.full((1, 4), 1e30), {}, ValueError, "beyond"),
        (ONE, {"k": 0}, ValueError, "k=0"),
        (ONE, {"recall": 0}, ValueError, "recall=0"),
        (ONE, {"recall": 1.5}, ValueError, "recall=1.5"),
        (ONE, {"where": "other > 3"}, ValueError, "other"),
        (ONE, {"where": "n >"}, ValueError, "where"),
        (ONE, {"allow": ["a"]}, TypeError, "allow"),
    ],
)
def test_a_search_refuses(index, query, options, error, words):
    with pytest.raises(error, match=words):
        index.search(query, **{"k": 3, **options})


def test_changes_refuse_and_change_nothing(index):
    before = index.search(ONE, 30, recall=1.0)
    cases = [
        (lambda: index.add([ONE], ids=[3]), ValueError, "3, which is in the index already"),
        (lambda: index.add([ONE, NAN]), ValueError, "item 1 holds NaN"),
        (lambda: index.add([np.ones((2, 5))]), ValueError, "item 0 has shape"),
        (lambda: index.add([np.full((2, 4), 1e6)]), ValueError, "float16"),
        (lambda: index.add([ONE], ids=[50, 51]), ValueError, "ids has 2 entries"),
        (lambda: index.add([ONE], attributes={"n": ["text"]}), TypeError, "'n'"),
        (lambda: index.add([ONE] * 10**6), BudgetError, "more items need"),
        (lambda: index.remove([3, 99]), KeyError, "99"),
        (index.remove, ValueError, "ids="),
        (lambda: index.remove(["a"]), TypeError, "integers"),
        (lambda: index.update([3, 99], [ONE, ONE]), KeyError, "99"),
        (lambda: index.update([3], [ONE, ONE]), ValueError, "ids has 1 entry"),
        (lambda: index.update([3, 4], [ONE, NAN]), ValueError, "item 1 holds NaN"),
        (lambda: index.update([3]), ValueError, "nothing to update"),
    ]
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()
        after = index.search(ONE, 30, recall=1.0)
        assert np.array_equal(before.ids, after.ids)
        assert np.array_equal(before.scores, after.scores)
    index.commit()
    assert len(index) == 20


def test_kinds_locks_and_closed_indexes(index, tmp_path):
    with pytest.raises(LockedError):
        MultiVectorIndex.open(index.path, writable=True)
    with MultiVectorIndex.open(index.path) as reader, pytest.raises(OSError, match="writable=True"):
        reader.add([ONE])
    with pytest.raises(FormatError):
        ZoomIndex.open(index.path)
    ZoomIndex.build(tmp_path / "zoom", np.ones((3, 4)), dram="1MiB").close()
    with pytest.raises(FormatError):
        MultiVectorIndex.open(tmp_path / "zoom")
    with pytest.raises(FileNotFoundError):
        MultiVectorIndex.open(tmp_path / "nothing")
    index.close()
    index.close()
    with pytest.raises(FileExistsError):
        MultiVectorIndex.build(index.path, [ONE], dram="4MiB")
    for call in (lambda: index.search(ONE, 3), lambda: index.add([ONE]), index.commit):
        with pytest.raises(ClosedError):
            call()

"""Columns of attributes: what cannot be one, and text, found by bisection in its vocabulary."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.ann.zoom.filters.attributes import Attributes, merge_schema, write_attributes
from memhier.ann.zoom.filters.bitmaps import unpack
from memhier.ann.zoom.filters.where import evaluate, parse
from memhier.io.reader import Reader
from memhier.store.store import Store


@pytest.mark.parametrize(
    ("attributes", "error", "message"),
    [
        ({"x": [1, 2]}, ValueError, "'x' has 2 values: expected 3"),
        ({"x": np.zeros((3, 1))}, ValueError, r"'x' has shape \(3, 1\)"),
        ({"x": [1, "a", 2]}, TypeError, "'x' holds int64 in row 0 and str in row 1"),
        ({"x": [1, True, 2]}, TypeError, "'x' holds int64 in row 0 and bool in row 1"),
        ({"x": ["a", 0.5, None]}, TypeError, "'x' holds str in row 0 and float64 in row 1"),
        ({"x": [1, [2], 3]}, TypeError, "'x' holds a list in row 1"),
        ({"x": [1, 2**63, 3]}, ValueError, "holds 9223372036854775808 in row 1"),
        ({"x": [np.uint64(2**63), 2, 3]}, ValueError, "holds 9223372036854775808 in row 0"),
        ({"x": np.array([1, 2**63, 3], np.uint64)}, ValueError, "holds 9223372036854775808"),
        ({"x": [0.5, 2**53 + 1, 3]}, ValueError, "in row 1, the integer 9007199254740993"),
        ({"x": [0.5, 10**400, 3]}, ValueError, "in row 1, the integer 1000"),
        ({"x": np.array([b"a", b"b", b"c"])}, TypeError, "decode it to text"),
        ({"x": np.array([1, 2, 3], "m8[s]")}, TypeError, "convert it to int64"),
        ({"x": np.zeros(3, complex)}, TypeError, "complex128"),
        ({"x": ["a", "\ud800", "c"]}, ValueError, "in row 1: expected text without surrogates"),
        ({"x": [None, None, None]}, ValueError, "null in every row"),
        ({"": [1, 2, 3]}, ValueError, "expected a name"),
        ({"a-b": [1, 2, 3]}, ValueError, "expected a name"),
        ({"a" * 65: [1, 2, 3]}, ValueError, "expected a name"),
        ({"é": [1, 2, 3]}, ValueError, "expected a name"),
        ({1: [1, 2, 3]}, ValueError, "expected a name"),
        ({"Null": [1, 2, 3]}, ValueError, "rename the column"),
        ([{"x": 1}], ValueError, "1 rows: expected 3"),
        ([1, 2, 3], TypeError, "expected columns by name"),
        (7, TypeError, "int: expected columns by name"),
    ],
)
def test_unstorable_attributes_are_refused(attributes, error, message):
    with pytest.raises(error, match=message):
        merge_schema({}, attributes, 3)


@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=40),
    sought=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), min_size=1, max_size=5),
    data=st.data(),
)
def test_text_is_found_by_bisection_wherever_it_stands(words, sought, data, tmp_path_factory):
    sought += data.draw(st.lists(st.sampled_from(words), max_size=3)) if words else []
    folder = tmp_path_factory.mktemp("words")
    texts = np.array(words, object)
    schema = {"s": "str"}
    with Store.create(folder / "store", kind="test") as store, store.begin() as tx:
        write_attributes(tx, "p-", schema, {"s": texts}, np.arange(len(words)))
        tx.commit()
    with Store.open(folder / "store", kind="test") as store, Reader(engine="python") as reader:
        part = Attributes(store, "p-", schema, len(words), reader)
        for sign in ("<", "<=", ">", ">=", "==", "!="):
            for text in sought:
                tree = parse("s " + sign + " '" + text.replace("'", "''") + "'")
                expected = evaluate(tree, {"s": texts})
                assert unpack(part.bitmap(tree), len(words)).tolist() == expected.tolist()
        assert part.take(np.arange(len(words)))["s"].tolist() == words

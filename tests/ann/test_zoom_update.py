"""An update of vectors: attributes that are not given are kept."""

import numpy as np
import pytest

from memhier.ann import ZoomIndex

LANGS = ["en", "de", None]


def make(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)


def columns(count, seed):
    random = np.random.default_rng(seed)
    values = {
        "price": [None if each == 0 else int(each) for each in random.integers(0, 30, count)],
        "weight": [None if each < 0.1 else float(each) for each in random.random(count)],
        "sold": [[True, False, None][each] for each in random.integers(0, 3, count)],
        "lang": [LANGS[each] for each in random.integers(0, 3, count)],
    }
    for column, value in zip(values.values(), (7, 0.5, True, "en"), strict=True):
        column[0] = value  # a column of nulls alone has no type
    return values


def selected(index, where):
    found = index.search(np.zeros(index.dimension), max(1, len(index)), recall=1.0, where=where).ids
    return {name for name in found.tolist() if name not in (-1, None)}


def same(index, rows):
    """Whether filters find just the rows of the model that have each value, and those that have none."""
    names = {name for row in rows.values() for name in row}
    for name in names:
        for value in {row.get(name) for row in rows.values()}:
            shown = "null" if value is None else repr(value).lower() if isinstance(value, bool) else repr(value)
            where = f"{name} is null" if value is None else f"{name} == {shown}"
            if selected(index, where) != {each for each, row in rows.items() if row.get(name) == value}:
                return False
    return True


def as_rows(values, ids):
    return {each: {name: column[at] for name, column in values.items()} for at, each in enumerate(ids)}


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("spilled", [False, True])
def test_attributes_that_are_not_given_are_kept(tmp_path, small_sizes, strings, spilled):
    """Of vectors that wait, of those that were written, and of some of each; given whole, in part, or not at all."""
    every = [f"name{number}" for number in range(90)] if strings else list(range(90))
    first, more = columns(60, 1), columns(30, 2)
    random = np.random.default_rng(3)
    with ZoomIndex.build(tmp_path / "index", make(60), ids=every[:60], attributes=first, dram="4MiB") as index:
        index.add(make(30, 1), ids=every[60:], attributes=more)
        if spilled:
            index.commit()
        rows = as_rows(first, every[:60]) | as_rows(more, every[60:])
        assert same(index, rows)
        for number in range(8):
            chosen = [every[each] for each in random.permutation(90)[: [1, 3, 17, 60][number % 4]]]
            values = columns(len(chosen), 10 + number)
            given = {name: values[name] for name in list(values)[: number % 5]}
            vectors = make(len(chosen), 20 + number)
            index.update(chosen, vectors, given or None)
            for name, row in as_rows(given, chosen).items():
                rows[name] |= row
            np.testing.assert_array_equal(index.reconstruct(chosen), vectors)
            assert same(index, rows)
        index.compact()
        assert same(index, rows)
    with ZoomIndex.open(tmp_path / "index") as index:
        assert same(index, rows)


def test_a_dict_for_each_vector_keeps_the_names_that_it_has_not(tmp_path):
    values = {"price": [1, 2, 3], "lang": ["en", "de", "fr"]}
    with ZoomIndex.build(tmp_path / "index", make(3), attributes=values, dram="4MiB") as index:
        index.update([0, 1, 2], make(3, 1), [{"price": 10}, {"lang": None}, {}])
        assert same(index, as_rows({"price": [10, 2, 3], "lang": ["en", None, "fr"]}, range(3)))


def test_a_new_attribute_in_an_update_leaves_the_others(tmp_path):
    with ZoomIndex.build(tmp_path / "index", make(3), attributes={"price": [1, 2, 3]}, dram="4MiB") as index:
        index.update([1], make(1, 1), {"lang": ["en"]})
        assert same(index, {0: {"price": 1}, 1: {"price": 2, "lang": "en"}, 2: {"price": 3}})


def test_null_given_as_a_value_is_null(tmp_path):
    with ZoomIndex.build(tmp_path / "index", make(3), attributes={"price": [1, 2, 3]}, dram="4MiB") as index:
        index.update([1], make(1, 1), {"price": [None]})
        assert same(index, {0: {"price": 1}, 1: {"price": None}, 2: {"price": 3}})


def test_an_update_that_is_refused_changes_nothing(tmp_path):
    with ZoomIndex.build(tmp_path / "index", make(3), attributes={"price": [1, 2, 3]}, dram="4MiB") as index:
        for change, error in (
            (lambda: index.update([1, 9], make(2)), KeyError),
            (lambda: index.update([1], make(2)), ValueError),
            (lambda: index.update([1], make(1), {"price": ["text"]}), TypeError),
            (lambda: index.update([1], make(1), 7), TypeError),
        ):
            with pytest.raises(error):
                change()
        assert same(index, {0: {"price": 1}, 1: {"price": 2}, 2: {"price": 3}})
        np.testing.assert_array_equal(index.reconstruct([0, 1, 2]), make(3))

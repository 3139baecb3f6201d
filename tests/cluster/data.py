"""Vectors, fields and changes for indexes over shards, and the comparison of two results."""

import numpy as np

COUNT, DIMENSION = 3000, 16


def clustered(count, seed):
    """Vectors around forty centres, as data of a kind that shards part well."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(40, DIMENSION)) * 4
    return (centres[random.integers(0, 40, count)] + random.normal(size=(count, DIMENSION))).astype(np.float32)


def attributes_of(ids):
    return {
        "n": ids, "lang": [("en", "de", None)[i % 3] for i in ids], "rare": [True if i == 17 else None for i in ids],
        "share": [i / 7 if i % 2 else None for i in ids],
        "when": [np.datetime64("2020-01-01", "us") + np.timedelta64(int(i), "D") for i in ids],
    }  # fmt: skip


def documents_of(ids):
    return [{"text": f"number {i}", "more": {"half": int(i) // 2}} if i % 5 else {"text": f"number {i}"} for i in ids]


def same(one, sharded):
    """Whether two results hold the same neighbours and fields."""
    np.testing.assert_array_equal(one.ids, sharded.ids)
    np.testing.assert_array_equal(one.distances, sharded.distances)
    assert one.fields.keys() == sharded.fields.keys()
    for name, column in one.fields.items():
        assert column.tolist() == sharded.fields[name].tolist() or column.dtype.kind == "f", name
    assert repr(one.rows()) == repr(sharded.rows())


def change(index, round_number):
    """Add, replace (some to other cells), and remove vectors."""
    first = 10_000 * (round_number + 1)
    ids = np.arange(first, first + 200)
    index.add(clustered(200, first), ids, attributes_of(ids), documents_of(ids))
    moved = np.arange(40) + 50 * round_number
    index.update(moved, clustered(40, first + 1), {"lang": ["fr"] * 40}, [{"text": f"moved {n}"} for n in moved])
    index.update(moved[:5] + 500, clustered(5, first + 2))
    index.remove(np.arange(1000, 1030) + 50 * round_number)

"""Indexes over shards built from files and from Ray Datasets, which tasks read, beside one index."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray.util", reason="needs the extra ray; `make test-cluster` installs it")
pytest.importorskip("pyarrow", reason="needs the extra parquet; `make develop` installs it")

import pyarrow as pa
import pyarrow.parquet as pq
from ray import data

from memhier.ann import ZoomIndex
from memhier.ann.cluster import ShardedIndex
from tests.cluster.data import clustered, same

pytestmark = [
    pytest.mark.usefixtures("ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of Ray Data itself
]
COUNT = 1500


def table_of(vectors, ids):
    """A table with vectors, ids, attributes with nulls, lists, and documents."""
    return pa.table({
        "vectors": pa.array([*vectors.astype(np.float32)], pa.list_(pa.float32())), "id": ids,
        "lang": pa.array([("en", "de", None)[n % 3] for n in range(len(ids))]),
        "share": pa.array([n / 7 if n % 2 else None for n in range(len(ids))]),
        "tags": pa.array([[n % 4, n % 5] if n % 7 else None for n in range(len(ids))], pa.list_(pa.int64())),
        "text": pa.array([f"number {n}" if n % 5 else None for n in range(len(ids))]),
    })  # fmt: skip


@pytest.mark.parametrize("kind", ["int64", "str"])
def test_an_index_of_a_dataset_equals_one_index(tmp_path, kind):
    vectors = clustered(COUNT, 1)
    ids = [f"item {n}" for n in range(COUNT)] if kind == "str" else [7 * n + 3 for n in range(COUNT)]
    table = table_of(vectors, pa.array(ids))
    given = {"dram": "12MiB", "grow_to": 2 * COUNT}
    attributes = {name: table[name] for name in ("lang", "share", "tags")}
    queries = clustered(30, 2)
    with (
        ZoomIndex.build(tmp_path / "one", vectors, ids=ids, attributes=attributes, documents={"text": table["text"]},
                        **given) as one,
        ShardedIndex.build(tmp_path / "many", data.from_arrow([table[:400], table[400:]]), shards=3, ids="id",
                           attributes=["lang", "share", "tags"], documents=["text"], **given) as many,
    ):  # fmt: skip
        assert len(many) == COUNT
        for where in (None, "lang == 'de' and tags contains 3"):
            options = {"recall": 1.0, "where": where, "fields": ["lang", "share", "tags", "text"]}
            same(one.search(queries, 5, **options), many.search(queries, 5, **options))
        more = ["a", "b"] if kind == "str" else None
        assert many.add(clustered(2, 3), more).tolist() == more or [7 * COUNT - 4, 7 * COUNT - 3]
        many.commit()
        assert many.check() == []


def test_an_index_of_files_equals_one_index(tmp_path):
    """Rows are counted over all files, of both kinds and several dtypes; equal input gives equal shards."""
    vectors = np.rint(clustered(COUNT, 1) * 4).astype(np.float32)
    np.save(tmp_path / "a.npy", vectors[:500])
    np.save(tmp_path / "b.npy", vectors[500:501])
    pq.write_table(table_of(vectors[501:], pa.array(range(COUNT - 501))), tmp_path / "c.parquet", row_group_size=300)
    files = [tmp_path / "a.npy", f"file://{tmp_path}/b.npy", f"file://{tmp_path}/c.parquet"]
    queries = clustered(30, 2) * 4
    with ZoomIndex.build(tmp_path / "one", vectors, dram="12MiB") as one:
        expected = one.search(queries, 5, recall=1.0)
    sizes = []
    for name in ("x", "y"):
        with ShardedIndex.build(tmp_path / name, files, shards=2, dram="12MiB") as many:
            same(expected, many.search(queries, 5, recall=1.0))
            sizes.append(many.stats()["vectors_of_shards"])
    assert sizes[0] == sizes[1]


def test_wrong_tables_are_refused_and_leave_nothing(tmp_path):
    vectors, ids = clustered(300, 1), np.arange(300)
    sound = table_of(vectors, pa.array(ids))
    twice, wrong = ids.copy(), vectors.copy()
    twice[200], wrong[250, 3] = 10, np.nan
    np.save(tmp_path / "a.npy", vectors[0])
    np.save(tmp_path / "b.npy", vectors)
    (tmp_path / "c.npy").write_bytes((tmp_path / "b.npy").read_bytes()[:-100])
    for vectors_given, options, message in (
        (data.from_arrow(sound), {}, "ids=None"), (data.from_arrow(sound), {"ids": "none"}, "none"),
        (data.from_arrow(sound), {"ids": [1, 2]}, "ids=list"), (sound["vectors"], {"column": "x"}, "column"),
        (data.from_arrow(sound), {"ids": "id", "attributes": "lang"}, "attributes"),
        (data.from_arrow([table_of(vectors[:150], twice[:150]), table_of(vectors[150:], twice[150:])]), {"ids": "id"},
         "10"),
        (data.from_arrow(table_of(wrong, pa.array(ids))), {"ids": "id"}, "finite|NaN"),
        ([tmp_path / "a.npy"], {}, "n, d"), ([tmp_path / "b.npy"], {"ids": "id"}, "columns"),
        ([tmp_path / "c.npy"], {}, "ends"), ([tmp_path / "x.csv"], {}, "npy"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=message):
            ShardedIndex.build(tmp_path / "new", vectors_given, shards=2, dram="12MiB", **options)
    with pytest.raises(FileNotFoundError):
        ShardedIndex.build(tmp_path / "new", [tmp_path / "none.npy"], shards=2, dram="12MiB")
    assert not (tmp_path / "new").exists()


def test_the_dram_of_the_process_that_builds_does_not_grow_with_the_vectors(tmp_path):
    """It holds a sample alone; vectors and row numbers pass by it."""
    random = np.random.default_rng(0)
    names = []
    for number in range(3):
        names.append(str(tmp_path / f"{number}.npy"))
        np.save(names[-1], random.normal(size=(2000 if not number else 150_000, 64)).astype(np.float32))
    nbytes = 2 * 150_000 * 64 * 4
    ended = subprocess.run(
        [sys.executable, Path(__file__).with_name("build_in_little_room.py"), str(tmp_path / "index"), names[0],
         *names[1:]], capture_output=True, text=True, timeout=800,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[-1]) < nbytes / 3

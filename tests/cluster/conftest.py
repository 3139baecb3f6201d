"""One Ray cluster of this machine for all tests of this folder."""

import numpy as np
import pytest

from tests.cluster.data import COUNT, attributes_of, clustered, documents_of


@pytest.fixture(scope="session")
def ray():
    """Start Ray, and stop it at the end."""
    pytest.importorskip("ray.util", reason="needs the extra ray; `make test-cluster` installs it")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def vectors():
    """The vectors of most tests."""
    return clustered(COUNT, 0)


@pytest.fixture(scope="session")
def built(ray, tmp_path_factory):
    """The folder of an index of :func:`vectors` on three shards, to be copied."""
    from memhier.ann.cluster import ShardedIndex

    path, ids = tmp_path_factory.mktemp("built") / "sharded", np.arange(COUNT)
    given = {"attributes": attributes_of(ids), "documents": documents_of(ids), "dram": "12MiB", "grow_to": 2 * COUNT}
    ShardedIndex.build(path, clustered(COUNT, 0), shards=3, **given).close()
    return path


@pytest.fixture
def pair(ray, vectors, tmp_path):
    """A pair to change: one index, and the same on three shards with two replicas each."""
    from memhier.ann import ZoomIndex
    from memhier.ann.cluster import ShardedIndex

    ids = np.arange(COUNT)
    given = {
        "attributes": attributes_of(ids), "documents": documents_of(ids), "dram": "12MiB", "grow_to": 2 * COUNT,
    }  # fmt: skip
    with (
        ZoomIndex.build(tmp_path / "one", vectors, **given) as one,
        ShardedIndex.build(tmp_path / "sharded", vectors, shards=3, replicas=2, **given) as sharded,
    ):
        yield one, sharded, tmp_path / "sharded"

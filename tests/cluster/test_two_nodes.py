"""Two nodes of a Ray cluster on this machine, each with its own folder by an environment variable of its own."""

import time

import numpy as np
import pytest

pytest.importorskip("ray.util", reason="needs the extra ray; `make test-cluster` installs it")

from tests.cluster.data import COUNT, clustered, same


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """A cluster of two nodes; `$SSD` is another folder on each. Return the cluster, and a function that adds a node."""
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster()

    def start(name, **options):
        monkeypatch.setenv("SSD", str(tmp_path / name))
        (tmp_path / name).mkdir(exist_ok=True)
        return cluster.add_node(num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, **options)

    # Ray notices a lost node after about four seconds; by default after fifteen.
    health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 4}
    nodes = [start("first", _system_config=health), start("second")]
    monkeypatch.setenv("SSD", "/nowhere")
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, nodes, start
    ray.shutdown()
    cluster.shutdown()


def test_a_node_may_go_and_come_back(two_nodes, tmp_path):
    """Searches go on from replicas; without them they are partial; the node's shards come back with it."""
    from memhier.ann.cluster import ShardedIndex

    cluster, nodes, start = two_nodes
    vectors, queries = clustered(COUNT, 0), clustered(25, 8)
    given = {"dram": "12MiB", "grow_to": 2 * COUNT}
    with ShardedIndex.build("$SSD/twice", vectors, shards=2, replicas=2, **given) as twice:
        exact = twice.search(queries, 4, recall=1.0)
    ShardedIndex.build("$SSD/once", vectors, shards=2, **given).close()
    for name in ("first", "second"):
        assert len([*(tmp_path / name / "twice").iterdir()]) == 2
        assert len([*(tmp_path / name / "once").iterdir()]) == 1
    with (
        ShardedIndex.open("$SSD/twice", writable=True, patience=5.0) as twice,
        ShardedIndex.open("$SSD/once", patience=5.0) as once,
    ):
        cluster.remove_node(nodes[1], allow_graceful=False)
        same(exact, twice.search(queries, 4, recall=1.0))
        # The processes of a node that is gone may answer for a while.
        while not (some := once.search(queries, 4, recall=1.0, partial=True)).stats["lost_shards"]:
            same(exact, some)
            time.sleep(0.1)
        assert len(some.stats["lost_shards"]) == 1
        there = exact.ids[np.isin(exact.ids, some.ids)]
        assert 0 < len(there) < exact.ids.size
        twice.remove([int(exact.ids[0, 0])])
        twice.commit()
        after = twice.search(queries, 4, recall=1.0)
        start("second")
        twice.heal()
        assert twice.stats()["stale"] == []
    with ShardedIndex.open("$SSD/once") as once:
        same(exact, once.search(queries, 4, recall=1.0))
    with ShardedIndex.open("$SSD/twice") as twice:
        assert twice.check() == []
        same(after, twice.search(queries, 4, recall=1.0))


def until_noticed(work, between=lambda: None):
    """Do work that a loss cuts short as long as Ray lists the node; only a busy machine lets Ray notice it first."""
    from memhier.ann.cluster.nodes import alive_nodes
    from memhier.errors import ShardLostError

    try:
        work()
    except ShardLostError as error:
        if "was lost meanwhile" not in str(error):
            raise
        between()
        work()
    assert len(alive_nodes()) == 1


@pytest.mark.parametrize("call", ["open", "heal", "build", "pull", "reshard"])
def test_a_lost_node_that_ray_still_lists(two_nodes, tmp_path, call):
    """Before Ray notices the loss a call goes on with the nodes left, or raises ShardLostError; no error of Ray."""
    from memhier.ann.cluster import ShardedIndex

    cluster, nodes, _ = two_nodes
    vectors, queries = clustered(COUNT, 0), clustered(25, 8)
    given = {"dram": "12MiB", "grow_to": 2 * COUNT, "shards": 2, "replicas": 2}
    with ShardedIndex.build("$SSD/index", vectors, **given) as built:
        exact = built.search(queries, 4, recall=1.0)
        built.push(f"file://{tmp_path}/backup")
    with ShardedIndex.open("$SSD/index", writable=True, patience=2.0) as index:
        cluster.remove_node(nodes[1], allow_graceful=False)
        if call == "build":
            until_noticed(lambda: ShardedIndex.build("$SSD/other", vectors, **given).close())
        elif call == "pull":
            until_noticed(lambda: ShardedIndex.pull(f"file://{tmp_path}/backup", "$SSD/pulled"))
        elif call == "reshard":
            until_noticed(lambda: index.reshard(3), lambda: same(exact, index.search(queries, 4, recall=1.0)))
            same(exact, index.search(queries, 4, recall=1.0))
        elif call == "heal":
            index.remove([int(exact.ids[0, 0])])
            index.commit()
            index.heal()
            assert index.stats()["stale"] == []
            assert index.check() == []
    if call == "open":
        with ShardedIndex.open("$SSD/index", patience=2.0) as index:
            same(exact, index.search(queries, 4, recall=1.0))

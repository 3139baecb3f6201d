"""Another number of shards, while searches go on."""

import shutil
import threading

import pytest

pytest.importorskip("ray.util", reason="needs the extra ray; `make test-cluster` installs it")

from memhier.ann.cluster import ShardedIndex
from memhier.errors import BudgetError
from tests.cluster.data import COUNT, change, clustered, same
from tests.cluster.test_commit_faults import die, searched

pytestmark = pytest.mark.usefixtures("ray")


def folders(path):
    return sorted(each.name.partition("-")[0] for each in path.iterdir())


def test_resharded_results_are_those_of_before(built, tmp_path):
    """Ids, fields, changes, recall; searches and fetches of other threads go on through the switch."""
    path, wrong = tmp_path / "sharded", []
    shutil.copytree(built, path)
    with ShardedIndex.open(path, writable=True) as index:
        change(index, 0)
        with pytest.raises(ValueError, match="commit"):
            index.reshard(2)
        index.commit()
        before, exact, ended = searched(index), index.search(clustered(200, 8), 10, recall=1.0), threading.Event()

        def search():
            while not ended.is_set():
                try:
                    same(before, searched(index))
                    assert index.contains([5]).all()
                except BaseException as error:
                    wrong.append(error)
                    return

        threads = [threading.Thread(target=search) for _ in range(2)]
        for thread in threads:
            thread.start()
        for shards in (5, 2):
            index.reshard(shards, grow_to=2 * COUNT)
            assert len(index.stats()["vectors_of_shards"]) == shards
        ended.set()
        for thread in threads:
            thread.join()
        assert not wrong
        same(before, searched(index))
        assert folders(path) == ["layout"]
        found = index.search(clustered(200, 8), 10, recall=0.95)
        assert sum(len({*a} & {*b}) for a, b in zip(exact.ids, found.ids, strict=True)) >= 0.93 * 2000
        assert index.add(clustered(1, 3)).tolist() == [10_200]
        index.remove([10_200])
        change(index, 1)
        index.commit()
        after = searched(index)
        assert index.check() == []
    with ShardedIndex.open(path) as reader:
        same(after, searched(reader))
        assert reader.stats()["epoch"] == 4


def test_a_resharding_that_fails_leaves_the_old_shards(built, tmp_path):
    path = tmp_path / "sharded"
    shutil.copytree(built, path)
    with ShardedIndex.open(path, writable=True) as index:
        before = searched(index)
        with pytest.raises(BudgetError, match="dram"):
            index.reshard(2, dram="1KiB")
        assert folders(path) == ["shard"] * 3
        same(before, searched(index))
        index.push(f"file://{tmp_path}/far")
        index.reshard(1, replicas=2)
        assert index.stats()["replicas"] == 2
        index.push(f"file://{tmp_path}/far", keep=1)
    ShardedIndex.pull(f"file://{tmp_path}/far", tmp_path / "again")
    with ShardedIndex.open(tmp_path / "again") as again:
        same(before, searched(again))


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_writer_killed_while_it_reshards_leaves_one_of_the_two(built, tmp_path, step):
    """Before the old shards name their successor, before the new ones are marked as decided, and at the end."""
    path = tmp_path / "sharded"
    shutil.copytree(built, path)
    with ShardedIndex.open(path) as index:
        before = searched(index)
    die(path, "reshard", step)
    for writable in (False, True, False):
        with ShardedIndex.open(path, writable=writable) as index:
            same(before, searched(index))
            assert index.stats()["shards"] == (3 if step == 0 else 2)
    assert folders(path) == (["shard"] * 3 if step == 0 else ["layout"])

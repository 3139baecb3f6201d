"""The backup of an index over shards: push, pull, and shards that come back from it."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("ray.util", reason="needs the extra ray; `make test-cluster` installs it")

from memhier.ann.cluster import ShardedIndex
from memhier.errors import CorruptionError, FormatError, ShardLostError
from tests.cluster.data import change, clustered, same

pytestmark = pytest.mark.usefixtures("ray")


@pytest.fixture
def index(built, tmp_path):
    """An index on three shards, without replicas, and the folder above it."""
    shutil.copytree(built, tmp_path / "sharded")
    with ShardedIndex.open(tmp_path / "sharded", writable=True) as made:
        yield made, tmp_path


def searched(index):
    return index.search(clustered(20, 5), 5, recall=1.0, fields=True)


def objects_below(folder):
    return {each for each in Path(folder).rglob("*") if each.is_file() and "objects" in each.parts}


def test_a_backup_restores_each_commit_and_moves_only_news(index):
    """Also with other numbers of replicas, and goes on to be pushed to."""
    sharded, folder = index
    url = f"file://{folder}/far"
    first = sharded.push(url)
    before = searched(sharded)
    assert first.generation == 0
    assert first.moved_bytes > 0.9 * sum(each.stat().st_size for each in (folder / "far").glob("*/objects/*"))
    assert sharded.push(url).moved_bytes == 0
    assert len(list((folder / "far/catalogs").iterdir())) == 1
    change(sharded, 0)
    assert sharded.push(url).moved_bytes == 0  # changes without a commit are not in it
    sharded.commit()
    second = sharded.push(url)
    after = searched(sharded)
    assert second.generation == 1
    assert 0 < second.moved_bytes < first.moved_bytes
    assert ShardedIndex.pull(url, folder / "now", replicas=2).nbytes == second.nbytes * 2
    ShardedIndex.pull(url, folder / "then", number=1)
    with ShardedIndex.open(folder / "then") as then:
        same(before, searched(then))
    with ShardedIndex.open(folder / "now", writable=True) as now:
        same(after, searched(now))
        assert now.check() == []
        assert now.stats()["replicas"] == 2
        now.remove([7])
        now.commit()
        assert now.push(url).generation == 2
    change(sharded, 1)
    sharded.commit()
    with pytest.raises(FileExistsError, match="commit 2"):
        sharded.push(url)
    sharded.push(f"file://{folder}/other", keep=1)


def test_keep_leaves_whole_backups_only(index):
    sharded, folder = index
    url = f"file://{folder}/far"
    for round_number in range(3):
        sharded.push(url, keep=2)
        change(sharded, round_number)
        sharded.commit()
    sharded.push(url, keep=1)
    with pytest.raises(FileNotFoundError, match="backup 3"):
        ShardedIndex.pull(url, folder / "gone", number=3)
    ShardedIndex.pull(url, folder / "last")
    with ShardedIndex.open(folder / "last") as last:
        same(searched(sharded), searched(last))
        assert last.check() == []


def test_places_of_backups_are_checked(index, vectors):
    sharded, folder = index
    url = f"file://{folder}/far"
    with pytest.raises(FileNotFoundError, match="backup"):
        ShardedIndex.pull(url, folder / "new")
    with pytest.raises(ValueError, match="keep"):
        sharded.push(url, keep=0)
    sharded.push(url)
    with pytest.raises(FileExistsError, match="another folder"):
        ShardedIndex.pull(url, folder / "sharded")
    with ShardedIndex.build(folder / "b", vectors[:500], shards=2, dram="12MiB") as other:
        with pytest.raises(FormatError, match="another index"):
            other.push(url)
        with pytest.raises(FileExistsError, match="another folder"):
            ShardedIndex.pull(url, folder / "b")


def test_a_pull_cut_short_goes_on(index):
    """An object is missing: no index appears; once it is back the pull reads only what it lacks."""
    sharded, folder = index
    url = f"file://{folder}/far"
    sharded.push(url)
    victim = max((folder / "far").glob("*-0001-0/objects/*"), key=lambda each: each.stat().st_size)
    shutil.move(victim, folder / "aside")
    with pytest.raises(CorruptionError, match="missing"):
        ShardedIndex.pull(url, folder / "new")
    with pytest.raises(FileNotFoundError):
        ShardedIndex.open(folder / "new")
    shutil.move(folder / "aside", victim)
    assert ShardedIndex.pull(url, folder / "new").moved_bytes < sharded.push(f"file://{folder}/whole").moved_bytes
    with ShardedIndex.open(folder / "new") as new:
        same(searched(sharded), searched(new))


def test_a_push_cut_short_leaves_the_backup_before_it(index):
    """Objects of the next push are there, its catalog is not, or is damaged."""
    sharded, folder = index
    url = f"file://{folder}/far"
    sharded.push(url)
    before = searched(sharded)
    change(sharded, 0)
    sharded.commit()
    sharded.push(url)
    catalog = folder / "far/catalogs/00000002.json"
    contents = catalog.read_bytes()
    catalog.unlink()
    ShardedIndex.pull(url, folder / "before")
    with ShardedIndex.open(folder / "before") as old:
        same(before, searched(old))
    catalog.write_bytes(contents[:-20] + b"0" * 20)
    with pytest.raises(CorruptionError, match="checksum"):
        ShardedIndex.pull(url, folder / "damaged")
    catalog.unlink()
    assert sharded.push(url).generation == 1
    ShardedIndex.pull(url, folder / "after")
    with ShardedIndex.open(folder / "after") as new:
        same(searched(sharded), searched(new))


@pytest.mark.parametrize("shard", [0, 2])
def test_a_lost_shard_comes_back_from_the_backup(index, shard):
    """At open, where the backup has the last commit; otherwise the error says so."""
    sharded, folder = index
    url, lost = f"file://{folder}/far", folder / "sharded" / f"shard-{shard:04}-0"
    change(sharded, 0)
    sharded.commit()
    sharded.push(url)
    expected = searched(sharded)
    sharded.close()
    shutil.rmtree(lost)
    with pytest.raises(ShardLostError):
        ShardedIndex.open(folder / "sharded")
    with ShardedIndex.open(folder / "sharded", backup=url, writable=True) as again:
        same(expected, searched(again))
        change(again, 1)
        again.commit()
        assert again.check() == []
    shutil.rmtree(lost)
    with pytest.raises(ShardLostError, match="commit"):
        ShardedIndex.open(folder / "sharded", backup=url, patience=1.0, writable=True)


def test_a_shard_lost_in_use_is_healed_from_the_backup(index):
    """Searches are partial meanwhile."""
    sharded, folder = index
    url = f"file://{folder}/far"
    sharded.push(url)
    expected = searched(sharded)
    shutil.rmtree(folder / "sharded" / "shard-0001-0")
    sharded.simulate_fault(1)
    partial = sharded.search(clustered(20, 5), 5, recall=1.0, partial=True)
    assert partial.stats["lost_shards"] == [1]
    sharded.heal()
    assert sharded.stats is not None
    with pytest.raises(ShardLostError):
        searched(sharded)
    sharded.heal(url)
    same(expected, searched(sharded))
    change(sharded, 0)
    sharded.commit()
    assert sharded.check() == []


def test_replicas_push_in_turn(pair):
    """Whichever replica is good: a backup is whole, whatever the generations of their stores."""
    one, sharded, path = pair
    url = f"file://{path.parent}/far"
    for round_number, replica in enumerate([0, 1, 0]):
        change(one, round_number)
        change(sharded, round_number)
        sharded.simulate_fault(1, replica)
        sharded.commit()
        sharded.push(url)
        sharded.heal()
    ShardedIndex.pull(url, path.parent / "again")
    queries = clustered(20, 5)
    with ShardedIndex.open(path.parent / "again") as again:
        same(one.search(queries, 5, recall=1.0), again.search(queries, 5, recall=1.0))

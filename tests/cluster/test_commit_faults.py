"""Commits that are cut short: processes die by SIGKILL at each step, a disk is full."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.util", reason="needs the extra ray; `make test-cluster` installs it")

from memhier.ann.cluster import ShardedIndex
from memhier.ann.cluster.group import ShardGroup
from memhier.errors import ShardLostError
from tests.cluster.data import COUNT, change, clustered, same

pytestmark = pytest.mark.usefixtures("ray")
CHANGED = COUNT + 200 - 30  # vectors after a change
NOTE = 3  # the step that makes a commit, after three shards have prepared


def searched(index):
    return index.search(clustered(20, 5), 5, recall=1.0, fields=True)


@pytest.fixture(scope="module")
def results(built, tmp_path_factory):
    """The results of one search before and after the change."""
    path = tmp_path_factory.mktemp("results") / "sharded"
    shutil.copytree(built, path)
    with ShardedIndex.open(path, writable=True) as index:
        before = searched(index)
        change(index, 0)
        return before, searched(index)


def die(path, deed, step):
    """Change an index in a process that dies by SIGKILL before a step."""
    import ray

    address = ray.get_runtime_context().gcs_address
    ended = subprocess.run(
        [sys.executable, Path(__file__).with_name("die_at_step.py"), address, path, deed, str(step)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def each_step(count, usual):
    """Steps as parameters, of which all but the usual ones are slow."""
    return [pytest.param(step, marks=[] if step in usual else pytest.mark.slow) for step in range(count)]


@pytest.mark.parametrize("step", each_step(8, usual=(3, 4)))
def test_a_writer_killed_at_a_step_leaves_the_commit_on_all_shards_or_on_none(built, results, tmp_path, step):
    """Steps: three shards prepare, shard 0 notes the commit, three shards publish, the end."""
    path = tmp_path / "sharded"
    shutil.copytree(built, path)
    die(path, "commit", step)
    made = step > NOTE
    with ShardedIndex.open(path, writable=True) as index:
        assert len(index) == (CHANGED if made else COUNT)
        same(results[made], searched(index))
        if not made:
            change(index, 0)
        index.commit()
        same(results[1], searched(index))
        assert index.check() == []


@pytest.mark.parametrize("step", each_step(7, usual=(0, 3)))
def test_a_shard_killed_at_a_step_leaves_the_commit_on_all_shards_or_on_none(
    built, results, tmp_path, monkeypatch, step
):
    path = tmp_path / "sharded"
    shutil.copytree(built, path)
    done, tell = 0, ShardGroup.tell

    def one_by_one(group, calls):
        nonlocal done
        answers = []
        for call in calls:
            if call.method in ("prepare", "note", "publish"):
                if done == step:
                    os.kill(processes[call.shard], signal.SIGKILL)
                done += 1
            answers += tell(group, [call])
        return answers

    with ShardedIndex.open(path, writable=True) as index:
        processes = index.stats()["processes"]
        change(index, 0)
        with monkeypatch.context() as patched:
            patched.setattr(ShardGroup, "tell", one_by_one)
            if step <= NOTE:
                with pytest.raises(ShardLostError):
                    index.commit()
            else:
                index.commit()
                same(results[1], searched(index))
        if step < NOTE:
            index.rollback()
            same(results[0], searched(index))
    with ShardedIndex.open(path, writable=True) as again:
        same(results[step > NOTE], searched(again))
        assert again.check() == []


@pytest.mark.parametrize("shard", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_of_one_shard_refuses_the_commit_everywhere(built, results, tmp_path, shard):
    """The limit of the size of files of one process stands for the full disk; after a rollback all goes on."""
    path = tmp_path / "sharded"
    shutil.copytree(built, path)
    with ShardedIndex.open(path, writable=True) as index:
        process = index.stats()["processes"][shard]
        change(index, 0)
        before = resource.prlimit(process, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match=r"[Ff]ile|space|large"):
            index.commit()
        with ShardedIndex.open(path) as reader:
            same(results[0], searched(reader))
        resource.prlimit(process, resource.RLIMIT_FSIZE, before)
        same(results[1], searched(index))
        index.rollback()  # the store of that shard has closed itself
        same(results[0], searched(index))
        change(index, 0)
        index.commit()
        with ShardedIndex.open(path) as reader:
            same(results[1], searched(reader))
        assert index.check() == []

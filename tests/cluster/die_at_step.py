"""Change an index over shards in a process of its own, and die by SIGKILL before a step: ADDRESS PATH DEED STEP."""

import itertools
import os
import signal
import sys

import ray
from data import change

from memhier.ann.cluster import ShardedIndex
from memhier.ann.cluster.group import ShardGroup


def main(address: str, path: str, deed: str, step: int) -> None:
    """Open the index, and die within its change."""
    ray.init(address=address, log_to_driver=False)
    index = ShardedIndex.open(path, writable=True)
    steps, tell = itertools.count(), ShardGroup.tell

    def one_by_one(group, calls):
        answers = []
        for call in calls:
            if call.method in ("prepare", "note", "publish") and next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            answers += tell(group, [call])
        return answers

    if deed == "commit":
        change(index, 0)
    ShardGroup.tell = one_by_one
    if deed == "commit":
        index.commit()
    else:
        index.reshard(2)
    os.kill(os.getpid(), signal.SIGKILL)


main(*sys.argv[1:4], int(sys.argv[4]))

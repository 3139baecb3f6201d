"""Build an index over two shards from files, and print by how much the DRAM of this process grew: PATH FILE..."""

import sys

import ray

from memhier.ann.cluster import ShardedIndex


def peak():
    """Return the most private memory that this process held, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
small, large = sys.argv[2:3], sys.argv[3:]
ShardedIndex.build(sys.argv[1] + "-small", small, shards=2, dram="64MiB").close()
before = peak()
ShardedIndex.build(sys.argv[1], large, shards=2, dram="64MiB").close()
print(peak() - before)
ray.shutdown()

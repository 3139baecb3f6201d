"""The DRAM budget holds: a tier's memory, measured by the kernel in a process that is not allowed much more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memhier.budget import parse_bytes

ALLOWED_BEYOND = parse_bytes("32MiB")

# The work of a child process. Its peak is reset once everything is imported and the arrays of the work itself exist.
CHILD = """
import json, resource, sys, threading
from pathlib import Path
import numpy as np
from memhier.io.reader import Reader
from memhier.cache.slots import SlotMap
from memhier.table.tiered import Tiered

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

# The limit counts the stacks of threads, 8 MiB each otherwise, of which next to nothing is ever touched.
threading.stack_size(256 * 1024)
place, dram, allowed, policy, codec = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
rows, dim, batch = 100_000, 64, 4096
rng = np.random.default_rng(0)
keys = [(rng.zipf(1.2, batch) - 1) % rows if turn % 2 else rng.integers(0, rows, batch) for turn in range(12)]
new, out = np.empty((batch, dim), np.float32), np.empty((batch, dim), np.float32)
new[:], out[:] = 1, 0
Path("/proc/self/clear_refs").write_text("5")
before = field("VmRSS")
data = field("VmData")
resource.setrlimit(resource.RLIMIT_DATA, (data + dram + allowed, data + dram + allowed))
held = 0
with Tiered(place, "t", np.float32, dim, rows=rows, dram=dram, batch=batch, policy=policy, codec=codec) as table:
    for start in range(0, rows, batch):
        some = np.arange(start, min(start + batch, rows))
        new[:len(some)] = some[:, None] % 1000
        table.scatter(some, new[:len(some)])
    table.checkpoint()
    for turn, some in enumerate(keys):
        if turn % 4 == 0 and policy != "belady":
            ticket = table.prefetch(some)
        assert (table.gather(some, out)[:, 5] == some % 1000).all()
        if turn % 3 == 0:
            table.scatter(some, out)
        held = max(held, table.memory_bytes)
    table.checkpoint()
    held = max(held, table.memory_bytes)
    stats, capacity = table.stats(), table.capacity
print(json.dumps({"peak": field("VmHWM") - before, "held": held, "capacity": capacity, **stats}))
"""


def can_reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@pytest.mark.long
@pytest.mark.skipif(not can_reset_peak(), reason="the kernel resets no peak memory of a process here")
@pytest.mark.parametrize(
    ("dram", "policy", "codec"),
    [("24MiB", "lru", "none"), ("24MiB", "s3fifo", "int8"), ("32MiB", "belady", "none"), ("24MiB", "lfu", "fp16")],
)
def test_peak_stays_within_the_budget(tmp_path: Path, dram: str, policy: str, codec: str) -> None:
    budget = parse_bytes(dram)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "s"), str(budget), str(ALLOWED_BEYOND), policy, codec],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found["refetches"] > 0
    assert found["evictions"] > 0
    assert found["held"] <= budget
    assert found["peak"] <= budget + ALLOWED_BEYOND
    # A budget that is not used would be no proof.
    assert found["peak"] > budget // 2

"""The bytes and the time of an update of attributes: one column of one vector in a hundred.

python docs/examples/attribute_updates.py
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from memhier.ann import ZoomIndex

COLUMNS = {"stock": 1000, "rating": 5, "seller": 500, "tags": 100}


def written() -> int:
    """Return the bytes that this process has written."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def main(count: int) -> None:
    """Build an index, update it ten times, and print the medians."""
    random, taken = np.random.default_rng(0), []
    columns = {name: random.integers(0, most, count).tolist() for name, most in COLUMNS.items()}
    columns["tags"] = random.integers(0, 100, (count, 3)).tolist()
    vectors = random.normal(size=(count, 128)).astype("float32")
    with tempfile.TemporaryDirectory() as folder, ZoomIndex.build(
        os.path.join(folder, "index"), vectors, attributes=columns, dram=max(320 * count, 8 << 20), grow_to=2 * count
    ) as index:  # fmt: skip
        for _ in range(10):
            ids = random.permutation(count)[: count // 100]
            bytes_before, time_before = written(), time.process_time()
            index.update(ids, attributes={"stock": random.integers(0, 1000, len(ids))})
            index.commit()
            taken.append((written() - bytes_before, 1e3 * (time.process_time() - time_before)))
        each, spent = np.median(taken, axis=0)
        print(f"{count // 100:,} of {count:,} vectors: {each / 1e3:,.0f} kB written, {spent:.0f} ms of CPU")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 vectors instead of 100,000")
    main(20_000 if parser.parse_args().quick else 100_000)

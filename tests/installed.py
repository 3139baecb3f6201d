"""Try an installed memhier: the core that MEMHIER_NATIVE asks for, a store, a tier and reads.

``python tests/installed.py`` runs outside the checkout with any Python that has the wheel; cibuildwheel runs it so.
"""

import platform
import sys
import tempfile
from pathlib import Path

import numpy as np

import memhier
from memhier import backend


def main() -> None:
    """Write and read rows, and print the version, the core and the engine of reads."""
    with tempfile.TemporaryDirectory() as folder:
        with memhier.Tiered(Path(folder) / "tier", "rows", np.float32, 4, rows=100, dram="16MiB") as tier:
            tier.scatter([1, 99], np.ones((2, 4), np.float32))
            tier.checkpoint()
            assert tier.gather([1, 99, 50]).tolist() == [[1] * 4, [1] * 4, [0] * 4]
        file = Path(folder) / "file"
        file.write_bytes(bytes(range(256)) * 64)
        with memhier.Reader() as reader:
            assert reader.read(reader.add(file), [5, 4094], 4).tolist() == [[5, 6, 7, 8], [254, 255, 0, 1]]
            print(memhier.__version__, backend.name, reader.engine, platform.python_version(), sys.platform)


if __name__ == "__main__":
    main()

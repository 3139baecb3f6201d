"""The reader's core in C++ passes its own tests, which run without Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "memhier/native/tests"
# The folder of build tools is where `make` puts them.
PROGRAMS = os.pathsep.join(
    [str(Path(sys.executable).parent), str(ROOT / ".venv-build/bin"), os.environ.get("PATH", os.defpath)]
)


@pytest.mark.long
def test_plan_ring_fence_checksums_and_reads_hold(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=PROGRAMS)
    compiler = shutil.which(os.environ.get("CXX", "c++"), path=PROGRAMS)
    if not cmake or not compiler or not shutil.which("make", path=PROGRAMS):
        pytest.skip("needs cmake, make and a C++ compiler")
    for command in (
        [cmake, "-G", "Unix Makefiles", "-S", TESTS, "-B", tmp_path],
        [cmake, "--build", tmp_path],
        [tmp_path / "reader_test"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "hold" in done.stdout

"""The page reader refuses bad arguments and names them; the choice of its engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier import backend
from memhier.errors import CorruptionError
from memhier.io.page_file import PageFile
from memhier.io.python_reader import PythonPageReader
from memhier.io.reader import Reader

SECCOMP = Path(__file__).with_name("seccomp.py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "pages.bin"
    path.write_bytes(np.random.default_rng(1).bytes(30_000))
    return path


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"engine": "rings"}, ValueError, "engine='rings': expected one of uring, aio, threads, python"),
        ({"depth": 0}, ValueError, "depth=0"),
        ({"depth": 10**6}, ValueError, "depth=1000000"),
        ({"depth": 1.5}, TypeError, "depth=1.5"),
        ({"depth": True}, TypeError, "depth=True"),
        ({"direct": "yes"}, TypeError, "direct='yes'"),
        ({"contexts": 0}, ValueError, "contexts=0"),
        ({"contexts": 65}, ValueError, "contexts=65"),
        ({"run_pages": 0}, ValueError, "run_pages=0"),
        ({"run_pages": 257}, ValueError, "run_pages=257"),
        ({"contexts": "all"}, TypeError, "contexts='all'"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Reader(**options)


def test_bad_files(path: Path, tmp_path: Path) -> None:
    with Reader() as reader:
        with pytest.raises(FileNotFoundError) as missing:
            reader.add(tmp_path / "nothing")
        assert missing.value.filename == str(tmp_path / "nothing")
        with pytest.raises(IsADirectoryError):
            reader.add(tmp_path)
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OSError, match="not a regular file"):
            reader.add(tmp_path / "pipe")
        with pytest.raises(CorruptionError, match=r"pages\.bin: the file has 30,000 bytes, but 30,001"):
            reader.add(path, length=30_001)
        with pytest.raises(ValueError, match="length=-1"):
            reader.add(path, length=-1)
        with pytest.raises(ValueError, match=r"checksums: expected shape \[8\]"):
            reader.add(path, checksums=np.zeros(7, np.uint32))
        with pytest.raises(TypeError, match="checksums: expected a numpy array of uint32"):
            reader.add(path, checksums=np.zeros(8, np.int64))
        assert reader.stats()["files"] == 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"offsets": [0, 29_999]}, ValueError, r"offsets\[1\]=29999 with length=2.*30000 bytes"),
        ({"offsets": [5, -1]}, ValueError, r"offsets\[1\]=-1"),
        ({"offsets": [2**63 - 1]}, ValueError, r"offsets\[0\]=9223372036854775807"),
        ({"offsets": [0.5]}, TypeError, "offsets: expected integers, got an array of float64"),
        ({"offsets": [[0]]}, ValueError, r"offsets: expected shape \[n\]"),
        ({"length": 0}, ValueError, "length=0"),
        ({"length": 30_001}, ValueError, r"offsets\[0\]=0 with length=30001"),
        ({"length": 2.0}, TypeError, r"length=2\.0: expected an int"),
        ({"file": [0, 0, 0]}, TypeError, r"file=\[0, 0, 0\]: expected an int"),
        ({"file": 7}, ValueError, "file=7: expected a handle"),
        ({"file": -1}, ValueError, "file=-1: expected a handle"),
        ({"file": np.int32([0, 1, 99])}, ValueError, r"file\[2\]=99: expected a handle"),
        ({"file": np.int32([0, -1, 0])}, ValueError, r"file\[1\]=-1: expected a handle"),
        ({"file": np.int32([0, 0])}, ValueError, r"file: expected shape \(3,\), got \(2,\)"),
        ({"file": np.int64([0, 0, 0])}, TypeError, "file: expected an array of int32"),
        ({"file": np.int32([0, 1, 0]), "offsets": [0, 50, 0]}, ValueError, r"offsets\[1\]=50.*small"),
        ({"out": np.empty((3, 3), np.uint8)}, ValueError, r"out: expected shape \(3, 2\)"),
        ({"out": np.empty((3, 2), np.int8)}, TypeError, "out: expected an array of uint8"),
        ({"out": np.empty((2, 3), np.uint8).T}, ValueError, "out: expected a writable, C-contiguous"),
        ({"out": np.frombuffer(b"abcdef", np.uint8).reshape(3, 2)}, ValueError, "out: expected a writable"),
        ({"out": bytearray(6)}, TypeError, "out: expected an array of uint8"),
        ({"latency": np.empty(2, np.float32)}, ValueError, r"latency: expected shape \(3,\)"),
        ({"latency": np.empty(3)}, TypeError, "latency: expected an array of float32"),
    ],
)
def test_bad_reads_change_nothing(path: Path, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    small = path.with_name("small.bin")
    small.write_bytes(b"0123456789")
    with Reader() as reader:
        handle = reader.add(path)
        reader.add(small)
        with pytest.raises(error, match=words):
            reader.read(**{"file": handle, "offsets": [0, 1, 2], "length": 2, **arguments})
        assert reader.stats()["calls"] == 0


def test_the_core_guards_its_memory(path: Path) -> None:
    # Numbers that slip past Python's checks, as when another thread changes an array, must not reach memory.
    if backend.core is None:
        core: Any = PythonPageReader(engine="python", depth=8, contexts=1, run_pages=16)
    else:
        core = backend.core.PageReader(engine="auto", depth=8, contexts=1, run_pages=16)
    file = PageFile(path, None)
    handle = core.add(
        fd=file.fd, direct=file.direct, drops_cache=file.drops_cache, length=30_000, checksums=None, file=file
    )
    out = np.empty((1, 8), np.uint8)
    for number, offset in ((handle, 29_999), (handle, -1), (handle + 5, 0)):
        if backend.core is None and number == handle:
            continue
        fault = core.read(files=number, offsets=np.array([offset], np.int64), length=8, out=out)
        assert fault is not None
        assert fault[0] == "range"
    core.close()


def run_child(path: Path, error: int, *names: str, **environment: str) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if name != "MEMHIER_IO"}
    done = subprocess.run(
        [sys.executable, str(SECCOMP), str(path), str(error), *names],
        capture_output=True, text=True, check=False, env=kept | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    if "skip" in outcome:
        pytest.skip(outcome["skip"])
    return outcome


needs_core = pytest.mark.skipif(backend.core is None, reason="needs the compiled core")


@needs_core
@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is part of Linux")
@pytest.mark.parametrize("error", [1, 38, 12], ids=["EPERM", "ENOSYS", "ENOMEM"])
def test_a_denied_engine_gives_way_to_the_next(path: Path, error: int) -> None:
    assert run_child(path, error, "uring") == {"engine": "aio", "right": True}
    assert run_child(path, error, "uring", "aio") == {"engine": "threads", "right": True}


@needs_core
@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is part of Linux")
def test_an_engine_that_was_asked_for_and_denied_is_an_error(path: Path) -> None:
    outcome = run_child(path, 1, "uring", MEMHIER_IO="uring")
    assert outcome["error"] == "PermissionError"
    assert outcome["errno"] == 1
    assert "io_uring" in outcome["text"]
    outcome = run_child(path, 38, "aio", MEMHIER_IO="aio")
    assert outcome["errno"] == 38
    assert "io_setup" in outcome["text"]
    assert run_child(path, 1, "uring", MEMHIER_IO="threads") == {"engine": "threads", "right": True}


def test_the_environment_chooses_the_engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMHIER_IO", "python")
    assert Reader().engine == "python"
    monkeypatch.setenv("MEMHIER_IO", "carrier pigeon")
    with pytest.raises(ValueError, match="MEMHIER_IO='carrier pigeon': expected one of"):
        Reader()
    assert Reader(engine="python").engine == "python"
    monkeypatch.setenv("MEMHIER_IO", "")
    assert Reader().engine in ("uring", "aio", "threads", "python")
    monkeypatch.setattr(backend, "core", None)
    assert Reader().engine == "python"
    monkeypatch.setenv("MEMHIER_IO", "uring")
    with pytest.raises(RuntimeError, match="MEMHIER_IO='uring': needs the compiled core"):
        Reader()

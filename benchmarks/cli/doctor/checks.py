"""The checks of ``memhier doctor``: the installation, the machine and the place of the data."""

import importlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import numpy as np

from memhier import backend
from memhier.benchmarks.cli.plain_errors import words_of
from memhier.budget import format_bytes
from memhier.io.device import probe
from memhier.io.mounts import IN_MEMORY, mount_of
from memhier.io.reader import ENGINES, Reader
from memhier.store.store import Store

__all__ = ["Finding", "examine"]

State = Literal["good", "note", "bad"]
_PACKAGES = ("memhier", "numpy", "lmdb", "faiss-cpu", "torch", "click", "rich", "tqdm", "pyarrow", "h5py")
# An index opens a few files for each part, and a log one for each segment.
_FILES_LEAST = 256
# Those that the compiled loops have versions for, as /proc/cpuinfo calls them on x86-64 and on ARM.
_FEATURES = ("sse4_2", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "asimd", "crc32", "asimddp")


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about this machine.

    Attributes
    ----------
    name
        Its name.
    state
        ``"good"``; ``"note"``: works, and could be better; ``"bad"``: broken.
    words
        The fact, and the reason where it is not good.
    """

    name: str
    state: State
    words: str

    def to_dict(self) -> dict[str, str]:
        """Return it as plain values."""
        return asdict(self)


def examine(path: Path, seconds: float) -> Iterator[Finding]:
    """Yield all findings; `path` is a folder for data, or a file to read, and `seconds` the time to measure its device.

    A fault of one check is its finding, and the others go on.
    """
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": _versions,
        "core": _core,
        "faiss": _faiss,
        "processor": _processor,
        "engines": _engines,
        "limits": _limits,
        "place": lambda: _place(path),
        "device": lambda: _device(path, seconds),
    }
    for name, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            yield Finding(name, "bad", words_of(error))


def _versions() -> Iterator[Finding]:
    yield Finding("python", "good", f"{platform.python_version()} at {sys.executable}")
    yield Finding("system", "good", f"{platform.system()} {platform.release()} on {platform.machine()}")
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            yield Finding(name, "good", version(name))


def _core() -> Iterator[Finding]:
    if backend.core is not None:
        yield Finding("core", "good", "compiled")
    elif os.environ.get("MEMHIER_NATIVE") == "0":
        yield Finding("core", "note", "pure Python, as MEMHIER_NATIVE=0 asks for: slower")
    else:
        try:
            importlib.import_module("memhier_native._core")
        except ModuleNotFoundError:
            yield Finding("core", "note", "pure Python: this installation has no compiled core, and is slower")
        except ImportError as error:
            yield Finding("core", "bad", f"the compiled core cannot be loaded: {error}")


def _faiss() -> Iterator[Finding]:
    try:
        importlib.import_module("faiss")
    except ModuleNotFoundError:
        yield Finding("faiss", "note", "missing, for memhier.ann only: pip install 'memhier[search]'")
    except ImportError as error:
        yield Finding("faiss", "bad", f"cannot be loaded: {error}")


def _processor() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = set(re.findall(r"\w+", _text("/proc/cpuinfo")))
    features = ", ".join(name for name in _FEATURES if name in words) or "features unknown"
    yield Finding("processor", "good", f"{usable} of {os.cpu_count()} cores usable; {features}")


def _engines() -> Iterator[Finding]:
    chosen, asked = "", os.environ.get("MEMHIER_IO")
    try:
        with Reader() as reader:
            chosen = reader.engine
    except (OSError, RuntimeError, ValueError) as error:
        yield Finding("I/O engine", "bad", words_of(error))
    else:
        usual = "python" if backend.core is None else "uring"
        by = f", as MEMHIER_IO={asked} asks for" if asked else ""
        yield Finding("I/O engine", "good" if chosen == usual else "note", f"{chosen}{by}")
    for name in ENGINES:
        if name != chosen:
            try:
                Reader(name).close()
                yield Finding(f"engine {name}", "good", "can be had, not in use")
            except (OSError, RuntimeError) as error:
                yield Finding(f"engine {name}", "note", words_of(error))


def _limits() -> Iterator[Finding]:
    with suppress(ModuleNotFoundError):
        resource = importlib.import_module("resource")
        files, locked = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        enough = files == resource.RLIM_INFINITY or files >= _FILES_LEAST
        words = "unlimited" if files == resource.RLIM_INFINITY else f"{files:,}"
        yield Finding("open files", "good" if enough else "note", words + ("" if enough else ": raise it by ulimit -n"))
        words = "unlimited" if locked == resource.RLIM_INFINITY else format_bytes(locked)
        yield Finding("locked memory", "good", words)
    used, most = _text("/proc/sys/fs/aio-nr").strip(), _text("/proc/sys/fs/aio-max-nr").strip()
    if used and most:
        free = int(most) - int(used)
        yield Finding("AIO requests", "good" if free >= 4096 else "note", f"{free:,} of {int(most):,} free")


def _place(path: Path) -> Iterator[Finding]:
    kind, source = mount_of(path.absolute())
    state: State = "note" if kind in IN_MEMORY else "good"
    yield Finding("file system", state, f"{kind} on {source}" + (": memory, not an SSD" if state == "note" else ""))
    if path.is_file():
        yield _direct(path, path)
        return
    yield Finding("free space", "good", format_bytes(shutil.disk_usage(path).free))
    try:
        with tempfile.TemporaryDirectory(dir=path, prefix="memhier-doctor-") as scratch:
            file = Path(scratch) / "pages"
            file.write_bytes(bytes(1 << 16))
            yield _direct(file, path)
            yield _store(Path(scratch) / "store")
    except OSError as error:
        yield Finding("write", "bad", words_of(error))


def _direct(file: Path, place: Path) -> Finding:
    with Reader() as reader:
        handle = reader.add(file)
        reader.read(handle, np.zeros(1 if file.stat().st_size else 0, np.int64), 1)
        if reader.stats()["direct"]:
            return Finding("direct I/O", "good", f"works under {place}")
    return Finding("direct I/O", "note", "refused by this file system: reads go through the page cache")


def _store(path: Path) -> Finding:
    """Commit to a new store and read it again: locks, memory maps and syncs of this file system."""
    try:
        with Store.create(path, kind="doctor") as store, store.begin() as transaction:
            transaction.put("key", b"value")
            transaction.commit()
        with Store.open(path, kind="doctor") as store:
            if store.get("key") != b"value":
                return Finding("commit", "bad", "a commit cannot be read again")
    except (OSError, ValueError) as error:
        return Finding("commit", "bad", words_of(error))
    return Finding("commit", "good", "a store is made, committed, locked and read")


def _device(path: Path, seconds: float) -> Iterator[Finding]:
    if seconds == 0:
        return
    profile = probe(path, size="64MiB", seconds=seconds, depths=(1, 32))
    slow, fast = profile.depths
    yield Finding(
        "device",
        "good",
        f"{slow.latency_p50_us:,.0f} us a read; {fast.iops:,.0f} reads a second, 32 in flight; "
        f"{profile.sequential_mb_per_s:,.0f} MB/s in sequence ({seconds:g} s; memhier probe measures well)",
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

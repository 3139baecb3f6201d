"""What every test may ask for: the real data sets, where they are there, and interrupts at every line."""

import dis
import os
import random
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import _base
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import memhier
from memhier.benchmarks.datasets import data_folder
from memhier.errors import MemhierError

_ROOT = str(Path(memhier.__file__).parent)
_NO_ERROR = bytes([dis.opmap["LOAD_CONST"]] * 3)  # what `__exit__` is given then
_SHORT = 25  # lines, of which none is left out

# A busy machine is no fault of a property.
settings.register_profile("memhier", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("memhier")


def pytest_configure(config: pytest.Config) -> None:
    """Leave slow tests out unless a marker expression asks for something else (``-m slow``, or ``-m ""`` for all)."""
    # A shell that starts a command in the background has it ignore interrupts, and the tests send some.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not any(argument.startswith(("-m", "--markexpr")) for argument in config.invocation_params.args):
        config.option.markexpr = "not slow"


@pytest.fixture(autouse=True, scope="session")
def torchvision() -> Iterator[None]:
    """Define the operators that torchvision asks for at import, where its own are those of another torch."""
    if os.environ.get("MEMHIER_PLUGINS") is None:
        yield
        return
    import torch

    library = None
    with suppress(RuntimeError):  # torchvision is whole here
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms(Tensor a, Tensor b, float c) -> Tensor", "qnms(Tensor a, Tensor b, float c) -> Tensor"):
            library.define(name)
    yield
    del library  # the operators live as long as it


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """Make a folder in memory where there is one, for tests that write and sync very often."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def data() -> Callable[[str], Path]:
    """Return a function that takes a data set's name to its folder, and skips the test where there is none."""

    def folder(name: str) -> Path:
        path = data_folder() / name
        if not path.is_dir():
            pytest.skip(f"no data set {name!r} at {path}: put it there, or set MEMHIER_DATA")
        return path

    return folder


def _leaves_block(frame: FrameType) -> bool:
    """Whether a line is that of a `with` whose block has just ended: no signal is handled before its `__exit__`."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return any(code[start : start + 6 : 2] == _NO_ERROR for start in (at, at + 2))


class Interrupts:
    """Raises KeyboardInterrupt at each line of this library that a call comes to in the main thread, one after another.

    Parameters
    ----------
    apart
        How many lines lie between two interrupts of a long call, on average.

    Attributes
    ----------
    apart
        As given.
    roots
        Folders and files of the lines: also those of Python's locks and futures that are written in Python. Where the
        library is installed as links to its sources, parts of it lie outside its own folder.
    seen
        How often a call was interrupted, and how often it was made, was not, or refused to be made again.
    """

    def __init__(self, apart: int) -> None:
        self.apart = apart
        self.roots: tuple[str, ...] = (_ROOT, threading.__file__, _base.__file__)
        self._random = random.Random(0)
        self.seen: Counter[str] = Counter()

    def strike(self, call: Callable[[], object], point: int) -> bool:
        """Interrupt a call at a line, counted from 0; return False where it ended before."""
        reached = -1

        def line(frame: FrameType, event: str, value: Any) -> Any:
            nonlocal reached
            if event == "line" and not _leaves_block(frame):
                reached += 1
                if reached == point:
                    raise KeyboardInterrupt
            return line

        sys.settrace(lambda frame, *_: line if frame.f_code.co_filename.startswith(self.roots) else None)
        try:
            call()
        except KeyboardInterrupt:
            pass
        else:
            if reached >= point:
                self.seen["vanished"] += 1
        finally:
            sys.settrace(None)
        return reached >= point

    def every(self, call: Callable[[], object]) -> Iterator[int]:
        """Interrupt a call at one line after another, and yield each time, until a call ends."""
        point = 0
        while self.strike(call, point):
            self.seen["points"] += 1
            yield point
            point += 1 if point < _SHORT else self._random.randrange(1, 2 * self.apart)

    def settled(self, was_made: bool) -> None:
        """Count what a call has come to that was interrupted."""
        self.seen["after" if was_made else "before"] += 1

    def refuses(self, call: Callable[[], object]) -> bool:
        """Make a call that may be refused after an interrupt; return whether it is."""
        try:
            call()
        except MemhierError:
            self.seen["refused"] += 1
            return True
        return False


@pytest.fixture(
    params=[
        pytest.param(12, id="some"),
        pytest.param(1, id="every", marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
    ]
)
def interrupts(request: pytest.FixtureRequest) -> Iterator[Interrupts]:
    """Return what interrupts calls; none of the interrupts may have been lost."""
    found = Interrupts(request.param)
    yield found
    print("interrupts:", *(f"{name} {count}" for name, count in sorted(found.seen.items())))
    assert found.seen["points"] > 0
    assert found.seen["vanished"] == 0

"""Child processes that end with their parent: one that stayed would disturb the next run, or write into it."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["ONE_THREAD", "Ended", "last_words", "run_child"]

# One thread for every pool that a peer may start: figures are per core.
ONE_THREAD = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "TOKIO_WORKER_THREADS",
    "LANCE_CPU_THREADS", "NUMEXPR_NUM_THREADS",
)  # fmt: skip
_TAIL = 400
# A killed parent ends no child: the child asks for it by prctl(PR_SET_PDEATHSIG), then becomes the module to run.
_BOUND = (
    f"import ctypes, runpy, sys; ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)}); sys.argv = sys.argv[1:]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a child: its exit status, None if it took too long, and its output."""

    status: int | None
    said: str
    complained: str

    @property
    def why(self) -> str:
        """Return its status in words, and its last words."""
        if self.status is None:
            return "took too long"
        how = f"ended with {self.status}"
        if self.status < 0:
            how = f"was killed by {signal.Signals(-self.status).name}"
        return f"{how}: {last_words(self.complained) or last_words(self.said) or 'no words'}"


def run_child(
    python: Path, module: str, arguments: Sequence[str], timeout_s: float, more: dict[str, str] | None = None
) -> Ended:
    """Run a module with one thread for every pool, and end it, with all that it started, after `timeout_s`.

    The child also ends with this process, however that ends. `more` goes over the environment.

    Raises
    ------
    OSError
        When the interpreter cannot be started.
    """
    # Files, not pipes: a grandchild that holds the end of a pipe would be waited for.
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        child = subprocess.Popen(
            [str(python), "-c", _BOUND, module, *arguments],
            stdin=subprocess.DEVNULL, stdout=said, stderr=complained,
            env=os.environ | dict.fromkeys(ONE_THREAD, "1") | (more or {}),
            start_new_session=True,
        )  # fmt: skip
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(timeout_s)
        finally:
            # Processes that it started are of no use once it has ended, and a child that hangs ends here.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return Ended(status, _text(said), _text(complained))


def last_words(text: str) -> str:
    """Return the last lines of a process's output, without the frames of a traceback."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" ^~")]
    frames = [number for number, line in enumerate(lines) if line.startswith("File ")]
    # A frame is its place and, in most cases, its line of source.
    start = min(frames[-1] + 2, len(lines) - 1) if frames else max(0, len(lines) - 3)
    return "\n".join(lines[start:])[-_TAIL:]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")

"""Reads source files in a few processes and hands the results over in order."""

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from memhier.benchmarks.cli.demo.corpus import ReadFile, read_file
from memhier.benchmarks.cli.demo.sources import SourceFile

__all__ = ["read_files"]

PROCESSES_MAX = 4  # beyond that the one process that writes the corpus is the slower part
FILES_PER_TASK = 16
TASKS_WAITING = 4  # for each process: a bound on the memory of results not yet taken
FILES_FOR_POOL = 200  # fewer are read before a pool has started


def read_files(files: Sequence[SourceFile]) -> Generator[list[ReadFile] | None]:
    """Yield the functions of each file, in the order of `files`; None for one that cannot be read as Python."""
    processes = min(
        PROCESSES_MAX, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if processes == 1 or len(files) < FILES_FOR_POOL:
        yield from map(read_file, files)
        return
    # Spawned: a forked child of a process with threads (BLAS has them) may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _start)
    try:
        waiting: deque[Future[list[list[ReadFile] | None]]] = deque()
        for start in range(0, len(files), FILES_PER_TASK):
            waiting.append(pool.submit(_read_some, files[start : start + FILES_PER_TASK]))
            if len(waiting) >= processes * TASKS_WAITING:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            "a process that reads sources was killed, perhaps for want of memory: free some and start again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _read_some(files: Sequence[SourceFile]) -> list[list[ReadFile] | None]:
    return [read_file(file) for file in files]


def _start() -> None:
    """Prepare a child: it ends with its parent even when that is killed, and does not search trees for cycles."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends the others
    threading.Thread(target=end_with_parent, daemon=True).start()
    gc.disable()  # syntax trees hold no cycles, and looking for them took a tenth of the time

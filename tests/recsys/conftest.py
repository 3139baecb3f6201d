"""Fixtures that the tests of several trainers share."""

import importlib
import importlib.util
import multiprocessing
import os
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import distributed as dist

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([
    "torch._dynamo",  # the first step of an optimizer imports it
    "torch.nn.parallel", "torch.utils.data",
    "memhier.recsys.embedding.reading.lookahead", "memhier.recsys.embedding.sharding.sharded",
])  # fmt: skip


class Training:
    """A script in a process of its own, which is forked from one that has imported torch: that takes seconds."""

    def __init__(self, script: Path, *arguments: Any) -> None:
        receiving, sending = _FORKS.Pipe(duplex=False)
        run = str(Path(__file__).with_name("run_forked.py"))
        given = {"output": sending, "words": [str(script), *map(str, arguments)]}
        self.process = _FORKS.Process(target=runpy.run_path, args=(run, given))
        # A process imports the main module of the one that starts it, which is pytest here.
        main = {"__main__": types.ModuleType("__main__")}
        with mock.patch.dict(sys.modules, main), mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
            self.process.start()
        sending.close()
        self.stdout = os.fdopen(os.dup(receiving.fileno()))
        receiving.close()

    def wait(self, timeout: float = 800) -> int | None:
        """Return the exit status; None if the process still runs after so many seconds."""
        self.process.join(timeout)
        return self.process.exitcode

    def end(self) -> tuple[int | None, str]:
        """Wait for the end; return the exit status and the rest of the output."""
        with self.stdout:
            output = self.stdout.read()
        return self.wait(), output


@pytest.fixture(scope="session")
def training() -> type[Training]:
    """Start a script in a process of its own."""
    return Training


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """Be the only rank of a group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def plugin() -> Callable[[str, str], Any]:
    """Return a function that imports a module of another library; without it the test is skipped.

    In the environment of ``make test-plugins`` (MEMHIER_PLUGINS=1) a library that is missing is a failure.
    """

    def load(module: str, package: str) -> Any:
        required = os.environ.get("MEMHIER_PLUGINS") == "1"
        if importlib.util.find_spec(module.partition(".")[0]) is None and not required:
            pytest.skip(f"{package} is not installed; make test-plugins tries it")
        return importlib.import_module(module)

    return load


@pytest.fixture
def avalanche(plugin: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch, torchvision: None) -> Any:
    """Avalanche, with stand-ins for what it imports and does not need here."""
    if importlib.util.find_spec("wandb") is None:
        wandb = types.ModuleType("wandb")
        wandb.__spec__ = importlib.util.spec_from_loader("wandb", None)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
    return plugin("avalanche.training", "avalanche-lib")

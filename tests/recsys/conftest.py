"""Fixtures that the tests of several trainers share."""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist


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


KEPT: list[Any] = []  # operators live as long as the library that defines them


@pytest.fixture
def torchvision() -> None:
    """Define the operators that torchvision asks for at import, where its own are those of another torch."""
    if not KEPT:
        try:
            library = torch.library.Library("torchvision", "DEF")
            KEPT.append(library)
            for name in ("nms(Tensor a, Tensor b, float c) -> Tensor", "qnms(Tensor a, Tensor b, float c) -> Tensor"):
                library.define(name)
        except RuntimeError:
            pass  # torchvision is whole here


@pytest.fixture
def avalanche(plugin: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch, torchvision: None) -> Any:
    """Avalanche, with stand-ins for what it imports and does not need here."""
    if importlib.util.find_spec("wandb") is None:
        wandb = types.ModuleType("wandb")
        wandb.__spec__ = importlib.util.spec_from_loader("wandb", None)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
    return plugin("avalanche.training", "avalanche-lib")

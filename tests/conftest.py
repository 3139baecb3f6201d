"""What every test may ask for: the real data sets, where they are there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from memhier.benchmarks.datasets import data_folder


def pytest_configure(config: pytest.Config) -> None:
    """Leave slow tests out unless a marker expression asks for something else (``-m slow``, or ``-m ""`` for all)."""
    if not any(argument.startswith(("-m", "--markexpr")) for argument in config.invocation_params.args):
        config.option.markexpr = "not slow"


@pytest.fixture(scope="session")
def data() -> Callable[[str], Path]:
    """Return a function that takes a data set's name to its folder, and skips the test where there is none."""

    def folder(name: str) -> Path:
        path = data_folder() / name
        if not path.is_dir():
            pytest.skip(f"no data set {name!r} at {path}: put it there, or set MEMHIER_DATA")
        return path

    return folder

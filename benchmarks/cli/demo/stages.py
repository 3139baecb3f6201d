"""The stages of the demo: a progress bar while each runs, and the seconds it took."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

__all__ = ["Stages"]


class Stages:
    """Runs named stages one after another.

    Attributes
    ----------
    seconds
        Of each stage that has ended, in order.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def run(self, name: str, total: int | None = None, unit: str = "", *, bar: bool = True) -> Iterator["tqdm[Any]"]:
        """Run a stage. Bars go to stderr, and only where that is a terminal; without `bar` the stage shows its own."""
        start = time.perf_counter()
        quiet = not bar or not sys.stderr.isatty()
        with tqdm(total=total, desc=name, unit=f" {unit}", unit_scale=True, leave=False, disable=quiet) as shown:
            yield shown
        self.seconds[name] = time.perf_counter() - start
        print(f"{name:<36} {self.seconds[name]:6.1f} s", file=sys.stderr, flush=True)

"""TorchRL's own tests of replay buffers, with :class:`TieredStorage` in the place of its memory-mapped storage.

``python -m memhier.benchmarks.suites.torchrl_tests FOLDER`` runs them by pytest from FOLDER, a checkout of
``github.com/pytorch/rl`` of about the installed version, whose tests lie in ``test/rb``. Wherever a test makes a
``LazyMemmapStorage``, it gets the storage of memhier. The last lines count the tests that made one; those that ask for
something that memhier's storage does not offer are left out, by reason.
"""

import sys
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import click

__all__ = ["Storing", "main"]

FILES = ("rb_core", "storages", "samplers", "prioritized", "writers")
ASIDE = "left out: "
LEFT_OUT = {
    "ndim": "items of several dimensions",
    "device": "on a device",
    "shared_init": "shared between processes",
    "existsok": "asks for files of TorchRL's",
    "auto_cleanup": "asks for files of TorchRL's",
    "cleanup_memmap": "asks for files of TorchRL's",
    "compilable": "under torch.compile",
}
PLAIN = {"ndim": (1,), "device": (None, "cpu"), "shared_init": (False,), "compilable": (False,)}


class Storing:
    """A plugin of pytest that gives tests a storage of memhier's, and counts them.

    Parameters
    ----------
    folder
        For the items.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Any] = []
        self._number = 0
        self.counts: Counter[str] = Counter()

    def install(self) -> None:
        """Take the place of TorchRL's class in its modules."""
        data = import_module("torchrl.data")
        plain, made = data.LazyMemmapStorage, self._make

        class LazyMemmapStorage(plain):  # type: ignore[misc, valid-type]
            def __new__(cls, max_size: int, *arguments: Any, **options: Any) -> Any:
                return made(max_size, *arguments, **options)

        for name in ("torchrl.data", "torchrl.data.replay_buffers", "torchrl.data.replay_buffers.storages"):
            import_module(name).LazyMemmapStorage = LazyMemmapStorage  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test that made a storage."""
        if report.when == "call" and self._made:
            reason = str(report.longrepr) if report.skipped else ""
            told = reason.split(ASIDE)[-1].rstrip("'\")") if ASIDE in reason else ""
            self.counts[ASIDE + told if told else report.outcome] += 1

    def pytest_runtest_setup(self) -> None:
        """Forget those of the test before."""
        for storage in self._made:
            if storage is not None:
                storage.close()
        self._made.clear()

    def _make(self, max_size: int, *arguments: Any, **options: Any) -> Any:
        import pytest

        from memhier.recsys.replay.adapters.torchrl import TieredStorage

        self._made.append(None)
        options.pop("scratch_dir", None)
        for name, value in options.items():
            given = str(value) if name == "device" and value is not None else value
            if given not in PLAIN.get(name, ()):
                pytest.skip(ASIDE + LEFT_OUT.get(name, name))
        self._number += 1
        storage = TieredStorage(max_size, self._folder / str(self._number), dram="24MiB")
        self._made.append(storage)
        return storage


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--file", "files", multiple=True, default=FILES, show_default=True, help="Files of test/rb.")
@click.option("--only", help="Tests with this in their names, as pytest's -k.")
def main(folder: Path, files: tuple[str, ...], only: str | None) -> None:
    """Run TorchRL's tests of replay buffers in FOLDER, a checkout, on storages of memhier."""
    import pytest

    with tempfile.TemporaryDirectory() as items:
        plugin = Storing(Path(items))
        plugin.install()
        sys.path[:0] = [str(folder / "test"), str(folder / "test" / "rb")]
        places = [str(folder / "test" / "rb" / f"test_{name}.py") for name in files]
        options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "--rootdir", str(folder), "--tb", "short", "-rf"]
        code = pytest.main([*options, *(["-k", only] if only else []), *places], plugins=[plugin])
        plugin.pytest_runtest_setup()
    click.echo(f"tests on storages of memhier: {plugin.counts['passed']} passed, {plugin.counts['failed']} failed")
    for reason, count in sorted(plugin.counts.items()):
        if reason.startswith(ASIDE):
            click.echo(f"{reason}: {count}")
    sys.exit(int(code))


if __name__ == "__main__":
    main()

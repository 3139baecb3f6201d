"""Every public name has an example, and every example in a docstring runs as it stands there.

An example sees no name of its module: it imports the names that it uses, as a reader's own code does.
"""

import ast
import doctest
import importlib
import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType

import numpy as np
import pytest

import memhier

PUBLIC = [
    "memhier", "memhier.ann", "memhier.ann.datasets", "memhier.ann.decoder", "memhier.ann.documents",
    "memhier.ann.huggingface", "memhier.ann.sklearn", "memhier.codecs", "memhier.errors", "memhier.policies",
    "memhier.recsys", "memhier.recsys.replay", "memhier.recsys.replay.adapters.avalanche",
    "memhier.recsys.replay.adapters.mammoth", "memhier.recsys.replay.adapters.torchrl",
    "memhier.recsys.replay.datasets",
]  # fmt: skip
NOT_RUN = ("avalanche", "torchrl")  # adapters with an example as text: no extra brings the packages that it needs

ROOT = Path(memhier.__file__).parent
OPTIONS = doctest.ELLIPSIS | doctest.REPORT_ONLY_FIRST_FAILURE


def _files() -> dict[str, Path]:
    """Return the files of the product that hold an example, by module."""
    found = {}
    for folder in (ROOT, ROOT / "ann", ROOT / "recsys"):  # two are links in a checkout, which rglob does not follow
        for file in folder.rglob("*.py"):
            inside = file.relative_to(ROOT)
            if inside.parts[0] not in ("native", "benchmarks") and ">>> " in file.read_text():
                found[".".join(("memhier", *inside.with_suffix("").parts)).removesuffix(".__init__")] = file
    return dict(sorted(found.items()))


FILES = _files()


def _examples(name: str, file: Path) -> Iterator[doctest.DocTest]:
    """Yield the examples of each docstring; doctest's own finder passes over decorated functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text, label = ast.get_docstring(node, clean=False) or "", getattr(node, "name", "docstring")
            if ">>> " in text:
                line = node.body[0].lineno - 1
                names = {"__name__": "__main__"}
                yield doctest.DocTestParser().get_doctest(text, names, f"{name}.{label}:{line}", str(file), line)


def _lacks_package(error: BaseException) -> bool:
    """Whether a package is missing that an extra brings."""
    if isinstance(error, ModuleNotFoundError):
        return error.name is not None and error.name.partition(".")[0] != "memhier"
    return isinstance(error, ImportError) and "pip install" in str(error)


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if _lacks_package(error):
            pytest.skip(f"{name}: {error}")
        raise


class _Runner(doctest.DocTestRunner):
    """Runs examples, and notes the packages that some of them lack."""

    def __init__(self) -> None:
        super().__init__(optionflags=OPTIONS, verbose=False)
        self.missing: dict[str, str] = {}

    def report_unexpected_exception(
        self,
        out: Callable[[str], object],
        test: doctest.DocTest,
        example: doctest.Example,
        exc_info: tuple[type[BaseException], BaseException, TracebackType],
    ) -> None:
        if _lacks_package(exc_info[1]):
            self.missing[test.name] = str(exc_info[1])
        super().report_unexpected_exception(out, test, example, exc_info)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name: str) -> None:
    module = _imported(name)
    mark = "::\n" if name.endswith(NOT_RUN) else ">>> "
    public = ((each, getattr(module, each)) for each in module.__all__)
    assert [each for each, value in public if mark not in (inspect.getdoc(value) or "")] == []


@pytest.mark.parametrize("name", FILES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runner, report = _Runner(), list[str]()
    with np.printoptions(precision=8, linewidth=75, threshold=1000, edgeitems=3, suppress=False, legacy=False):
        results = {test.name: runner.run(test, out=report.append) for test in _examples(name, FILES[name])}
    assert sum(result.attempted for result in results.values()) > 0
    failed = [each for each, result in results.items() if result.failed and each not in runner.missing]
    assert failed == [], "".join(report)
    if runner.missing:
        pytest.skip("; ".join(f"{each}: {reason}" for each, reason in runner.missing.items()))

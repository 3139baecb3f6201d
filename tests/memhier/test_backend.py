"""The choice between the compiled core and Python, in processes of their own: it is made once, at import."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memhier import backend

ASK = "from memhier import backend; print(backend.name, backend.core is not None)"
# An import that fails, as on a machine where nothing was compiled.
HIDE = "import sys; sys.modules['memhier_native._core'] = None\n"


def ask(code: str, value: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != "MEMHIER_NATIVE"}
    if value is not None:
        environment["MEMHIER_NATIVE"] = value
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )  # fmt: skip


def test_python_can_be_forced() -> None:
    assert ask(ASK, "0").stdout.split() == ["python", "False"]


def test_python_stands_in_where_nothing_is_compiled() -> None:
    assert ask(HIDE + ASK, None).stdout.split() == ["python", "False"]
    use = "; from memhier.io.reader import Reader; from memhier.io.kernels import crc32c"
    use += "; print(Reader().engine, crc32c(b'a'))"
    assert ask(HIDE + ASK + use, None).stdout.split() == ["python", "False", "python", str(0xC1D04330)]


def test_a_missing_core_that_was_asked_for_is_an_error() -> None:
    done = ask(HIDE + ASK, "1")
    assert done.returncode != 0
    assert "ImportError: MEMHIER_NATIVE=1, but the compiled core cannot be imported" in done.stderr
    assert "make build" in done.stderr


@pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
def test_the_compiled_core_is_taken_where_it_is() -> None:
    assert ask(ASK, None).stdout.split() == ["native", "True"]
    assert ask(ASK, "1").stdout.split() == ["native", "True"]


@pytest.mark.parametrize("value", ["", "2", "yes"])
def test_other_values_are_refused(value: str) -> None:
    done = ask(ASK, value)
    assert done.returncode != 0
    assert f"ValueError: MEMHIER_NATIVE={value!r}: expected 1 (compiled core), 0 (pure Python), or unset" in done.stderr


ROOT = Path(__file__).resolve().parents[2]
STUB = {
    node.name: node
    for node in ast.parse((ROOT / "memhier/native/memhier_native/_core.pyi").read_text()).body
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
}
TWINS = {
    "BeladyPolicy": "memhier.policies._belady_reference:BeladyReference",
    "DecoderCore": "memhier.ann.decoder.core.python_core:PythonCore",
    "DirectSlots": "memhier.cache.python_slots:DirectSlots",
    "HashSlots": "memhier.cache.python_slots:SortedSlots",
    "LRUPolicy": "memhier.policies._reference:Reference",
    "PageReader": "memhier.io.python_reader:PythonPageReader",
    "crc32c": "memhier.io.python_kernels:crc32c",
    "crc32c_pages": "memhier.io.python_kernels:crc32c_pages",
    "distances": "memhier.io.python_kernels:distances",
    "prune_links": "memhier.ann.links:prune_in_python",
    "reach_lists": "memhier.ann.zoom.preview.routing.python_graph:reach_lists",
    "sum_tree_draw": "memhier.recsys.replay.transitions.python_sum_tree:draw_leaves",
    "sum_tree_set": "memhier.recsys.replay.transitions.python_sum_tree:set_leaves",
    "walk_lists": "memhier.ann.zoom.preview.routing.python_graph:walk_lists",
}
# PageReader.rank: memhier.rows.python_ranking does it over any reader; mark_rows: memhier.ann.zoom.filters.postings;
# search: memhier.ann.zoom.search.search, in steps. A reference policy takes its order, too.
WITHOUT_TWIN = {
    ("PageReader", "rank"),
    ("PageReader", "mark_rows"),
    ("PageReader", "search"),
    ("PageReader", "search_plainly"),
    ("LRUPolicy", "__init__"),
}


def parameters_of(node: ast.FunctionDef) -> list[str]:
    """Return the parameters of a function of the stub, with a mark on those that have a default."""
    given = node.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults + given.kw_defaults
    names = [each.arg for each in given.args + given.kwonlyargs]
    return [name + "=" * (value is not None) for name, value in zip(names, defaults, strict=True) if name != "self"]


def parameters(function: Callable[..., object]) -> list[str]:
    found = inspect.signature(function).parameters.values()
    return [each.name + "=" * (each.default is not each.empty) for each in found if each.name not in ("self", "cls")]


@pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
def test_the_stub_names_what_the_core_has() -> None:
    assert set(STUB) == {name for name in dir(backend.core) if not name.startswith("_")}
    for name, node in STUB.items():
        if isinstance(node, ast.ClassDef):
            methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            exported = set(dir(getattr(backend.core, name)))
            assert methods <= exported, name
            assert {method for method in exported - methods if not method.startswith("_")} == set(), name


def test_mypy_sees_all_of_the_core() -> None:
    tree = ast.parse((ROOT / "memhier/backend.py").read_text())
    (core,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "_Core"]
    aliases = {
        ast.unparse(part.target if isinstance(part, ast.AnnAssign) else part.targets[0]): ast.unparse(part.value)
        for part in core.body
        if isinstance(part, ast.Assign | ast.AnnAssign) and part.value is not None
    }
    functions = {name for name, node in STUB.items() if isinstance(node, ast.FunctionDef)}
    assert aliases == {name: f"staticmethod(_core.{name})" if name in functions else f"_core.{name}" for name in STUB}


@pytest.mark.parametrize("name", TWINS)
def test_the_twins_in_python_take_what_the_core_takes(name: str) -> None:
    module, _, attribute = TWINS[name].partition(":")
    twin, node = getattr(importlib.import_module(module), attribute), STUB[name]
    if isinstance(node, ast.FunctionDef):
        assert parameters(twin) == parameters_of(node)
        return
    compared = 0
    for part in node.body:
        if not isinstance(part, ast.FunctionDef) or (name, part.name) in WITHOUT_TWIN:
            continue
        if part.name.startswith("__") and part.name != "__init__":
            continue
        if not any(ast.unparse(each) == "property" for each in part.decorator_list):
            assert parameters(getattr(twin, part.name)) == parameters_of(part), part.name
            compared += 1
    assert compared > 2

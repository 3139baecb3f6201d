"""The choice between the compiled core and Python, in processes of their own: it is made once, at import."""

import ast
import os
import subprocess
import sys
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


@pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
def test_the_stub_names_what_the_core_has() -> None:
    root = Path(__file__).resolve().parents[2]
    stub = ast.parse((root / "memhier/native/memhier_native/_core.pyi").read_text())
    declared = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert set(declared) == {name for name in dir(backend.core) if not name.startswith("_")}
    for name, node in declared.items():
        if isinstance(node, ast.ClassDef):
            lineage = [node, *(declared[base.id] for base in node.bases if isinstance(base, ast.Name))]
            methods = {part.name for kind in lineage for part in kind.body if isinstance(part, ast.FunctionDef)}
            exported = set(dir(getattr(backend.core, name)))
            assert methods <= exported, name
            assert {method for method in exported - methods if not method.startswith("_")} == set(), name

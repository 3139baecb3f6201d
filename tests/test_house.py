"""The rules of the house, held against the sources themselves.

Imports are read from the syntax trees, so a rule also holds for an import inside a function that no test calls.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("memhier", "ann", "recsys", "benchmarks")
FUNCTION_LINES = 70

# What each package may import of the house: itself and what lies below it.
BELOW = {
    "memhier": {"memhier"},
    "ann": {"memhier", "ann"},
    "recsys": {"memhier", "recsys"},
    "benchmarks": {"memhier", "ann", "recsys", "benchmarks"},
}
WITH_TORCH = (
    "beams",
    "contexts",
    "decoder",
    "head",
    "huggingface",
    "operators",
    "outcome",
    "proof",
    "sampling",
    "steps",
    "watch",
)  # of the decoder
# Third parties that a package must not import, and the files in it that may, being about nothing else.
BANNED: dict[str, dict[str, tuple[str, ...]]] = {
    "memhier": {"torch": (), "faiss": (), "rich": (), "click": (), "matplotlib": ()},
    "ann": {"torch": tuple(f"ann/decoder/module/{name}.py" for name in WITH_TORCH), "rich": (), "click": ()},
    "recsys": {"faiss": (), "rich": (), "click": ()},
    "benchmarks": {},
}
# What `import memhier` must not pay for: it has to stay under 0.2 s on a small machine.
HEAVY = ("lmdb", "faiss", "torch", "rich", "click", "matplotlib", "tqdm", "scipy", "pandas")


def _sources(package: str) -> list[Path]:
    # memhier holds symlinks to its three siblings: each file belongs to the folder that it really lies in.
    files = (file for file in (ROOT / package).rglob("*.py") if file.resolve() == file)
    return sorted(file for file in files if "__pycache__" not in file.parts)


SOURCES = [(package, file) for package in PACKAGES for file in _sources(package)]
CODE = [file for _, file in SOURCES] + sorted((ROOT / "tests").rglob("*.py"))


def _imported(tree: ast.AST) -> set[str]:
    """Return the dotted names that a module imports, and what it imports from them, too, since that may be a module."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write memhier...."
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _house(name: str) -> str | None:
    """Return the package of the house that a dotted name belongs to."""
    first, _, rest = f"{name}.".partition(".")
    if first != "memhier":
        return None
    second = rest.partition(".")[0]
    return second if second in PACKAGES else "memhier"


def _complaints(package: str, file: str, tree: ast.AST) -> list[str]:
    complaints = []
    for name in sorted(_imported(tree)):
        first = name.partition(".")[0]
        if first in PACKAGES and first != "memhier":
            complaints.append(f"{name}: write memhier.{name}")
        home = _house(name)
        if home is not None and home not in BELOW[package]:
            complaints.append(f"{name}: {package} may import only {', '.join(sorted(BELOW[package]))}")
        if first in BANNED[package] and file not in BANNED[package][first]:
            complaints.append(f"{name}: {first} is not for {package}")
    return complaints


@pytest.mark.parametrize(("package", "file"), SOURCES, ids=lambda value: str(value).removeprefix(f"{ROOT}/"))
def test_imports_point_down(package: str, file: Path) -> None:
    path = str(file.relative_to(ROOT))
    assert _complaints(package, path, ast.parse(file.read_text(), path)) == []


@pytest.mark.parametrize(
    ("package", "file", "line"),
    [
        ("memhier", "memhier/a.py", "import memhier.ann"),
        ("memhier", "memhier/a.py", "from memhier import recsys"),
        ("memhier", "memhier/a.py", "def f():\n    import torch"),
        ("memhier", "memhier/a.py", "from faiss import IndexFlat"),
        ("ann", "ann/a.py", "from memhier.recsys.embedding import table"),
        ("ann", "ann/a.py", "from memhier import benchmarks"),
        ("ann", "ann/zoom/index.py", "import torch.nn"),
        ("recsys", "recsys/a.py", "import memhier.ann.zoom as zoom"),
        ("recsys", "recsys/a.py", "import ann"),
        ("benchmarks", "benchmarks/a.py", "from benchmarks.cli import main"),
    ],
)
def test_the_rule_of_imports_catches(package: str, file: str, line: str) -> None:
    assert _complaints(package, file, ast.parse(line))


@pytest.mark.parametrize(
    ("package", "file", "line"),
    [
        ("memhier", "memhier/a.py", "from memhier import errors"),
        ("ann", "ann/decoder/module/decoder.py", "import torch"),
        ("recsys", "recsys/a.py", "import torch"),
        ("benchmarks", "benchmarks/a.py", "from memhier import ann, recsys"),
    ],
)
def test_the_rule_of_imports_allows(package: str, file: str, line: str) -> None:
    assert _complaints(package, file, ast.parse(line)) == []


def test_relative_imports_are_refused() -> None:
    with pytest.raises(AssertionError, match="relative"):
        _imported(ast.parse("from . import errors"))


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring."""
    first = function.body[0]
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    documented = ast.get_docstring(function, clean=False) is not None
    return lines - ((first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0)


def _long_functions(tree: ast.AST) -> list[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [f"{node.name}: {_code_lines(node)} lines" for node in functions if _code_lines(node) > FUNCTION_LINES]


@pytest.mark.parametrize("file", CODE, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_function_can_be_read_in_one_sitting(file: Path) -> None:
    assert _long_functions(ast.parse(file.read_text())) == []


def test_the_rule_of_functions_catches() -> None:
    body = "\n".join(["    x = 1"] * FUNCTION_LINES)
    assert _long_functions(ast.parse(f"def f():\n{body}")) == [f"f: {FUNCTION_LINES + 1} lines"]


def _module(package: str, file: Path) -> str:
    inside = file.relative_to(ROOT if package == "memhier" else ROOT / package).with_suffix("")
    parts = inside.parts if package == "memhier" else ("memhier", package, *inside.parts)
    return ".".join(parts).removesuffix(".__init__")


# The stub package around the compiled core is not part of memhier; pkgutil would miss what an editable install hides.
MODULES = sorted(_module(package, file) for package, file in SOURCES if "native" not in file.relative_to(ROOT).parts)


# The words of a module whose library is not in this environment; make test-plugins has them all.
MISSING_EXTRA = "pip install 'memhier["


def _names_modules_in_a_child(code: str, **environment: str) -> list[str]:
    """Return the names in ``sys.modules`` after `code` ran in a process of its own."""
    # Coverage or a debugger in the child would count as imports of this library.
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-X", "frozen_modules=on", "-c", script],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


@pytest.mark.parametrize("native", ["", "0"])
def test_importing_memhier_loads_nothing_heavy(native: str) -> None:
    environment = {"MEMHIER_NATIVE": native} if native else {}
    names = _names_modules_in_a_child("import memhier", **environment)
    assert "memhier" in names
    loaded = {name.partition(".")[0] for name in names}
    assert loaded.isdisjoint(HEAVY), sorted(loaded & set(HEAVY))


def test_importing_everything_makes_no_second_copy_of_a_package() -> None:
    # From the root of the checkout, where a bare `import ann` would find the folder.
    code = f"import importlib, sys; sys.path.insert(0, {str(ROOT)!r})\n"
    code += f"""
for name in {MODULES!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if {MISSING_EXTRA!r} not in str(error): raise
"""
    names = _names_modules_in_a_child(code)
    assert {"memhier.ann", "memhier.recsys", "memhier.benchmarks"} <= set(names)
    assert set(names).isdisjoint({"ann", "recsys", "benchmarks"})


@pytest.mark.parametrize("name", MODULES)
def test_public_names_exist_and_say_what_they_are(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if MISSING_EXTRA not in str(error):
            raise
        pytest.skip(str(error))
    assert inspect.getdoc(module), f"{name} has no docstring"
    if any(part.startswith("_") for part in name.split(".")):
        return
    if len(ast.parse(inspect.getsource(module)).body) == 1:  # a package that only gives a room its name
        return
    assert hasattr(module, "__all__"), f"{name} does not say what is public: give it an __all__"
    assert len(set(module.__all__)) == len(module.__all__), f"{name}.__all__ repeats a name"
    silent = [
        entry
        for entry in module.__all__
        if (entry.startswith("_") and entry != "__version__") or not _is_described(getattr(module, entry))
    ]
    assert not silent, f"{name}.__all__ has names that are private or without a docstring"
    # An implementation may leave the words to the interface that its package exports.
    package = importlib.import_module(name.rpartition(".")[0] or name)
    described = {method for kind in _classes(module) + _classes(package) for method in _methods(kind, described=True)}
    methods = [(f"{kind.__name__}.{method}", method) for kind in _classes(module) for method in _methods(kind)]
    silent = [shown for shown, method in methods if method not in described]
    assert not silent, f"{name} has methods without a docstring"


def _classes(module: ModuleType) -> list[type]:
    """Return the classes of the house that a module exports."""
    values = [getattr(module, entry) for entry in getattr(module, "__all__", ())]
    return [value for value in values if inspect.isclass(value) and value.__module__.startswith("memhier")]


def _is_described(value: object) -> bool:
    # A constant has no docstring of its own; it is explained in the source.
    # Nor has another library's function to which a module gives a plain name.
    ours = str(getattr(value, "__module__", "")).startswith("memhier")
    return bool(inspect.getdoc(value)) or not (inspect.isclass(value) or (inspect.isroutine(value) and ours))


def _methods(kind: type, *, described: bool = False) -> list[str]:
    """Return the public methods and properties that a class defines itself: all, or those with a docstring."""
    named = [(name, inspect.getattr_static(kind, name)) for name in vars(kind) if not name.startswith("_")]
    return [
        name
        for name, value in named
        if (isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value))
        and (inspect.getdoc(value) or not described)
    ]


@functools.cache
def _counts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house_counts", ROOT / "tests" / "house" / "counts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_count_of_the_house_grew() -> None:
    counts = _counts()
    found = counts.counts()
    assert counts.grown(found) == []
    assert set(counts.LIMITS) == set(found)


def test_the_counts_see_growth_circles_and_floors() -> None:
    counts = _counts()
    assert counts.grown({"lines": 3, "circles": 0}, {"lines": 2, "circles": 0}) == ["lines: 3, at most 2"]
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}
    assert counts.circles(graph) == [["a", "b", "c"]]
    assert counts.circles({"a": {"b"}, "b": set()}) == []
    assert counts.floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 3

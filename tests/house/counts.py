"""Count rooms, floors, arrows and circles of the product, and other measures of how easy it is to read.

``make house`` prints the counts and fails if one grew past its limit in ``limits.json``. A room is a module or a folder
directly inside a folder; an arrow is an import from one room to another; a floor is a level of the imports; a circle is
a group of rooms that import each other. Imports inside functions and for type checking are no arrows.
"""

import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

__all__ = ["LIMITS", "circles", "counts", "floors", "grown", "shape", "sources"]

ROOT = Path(__file__).resolve().parents[2]
LIMITS: dict[str, float] = json.loads(Path(__file__).with_name("limits.json").read_text())
PACKAGES = ("memhier", "ann", "recsys", "benchmarks")
PRODUCT = PACKAGES[:3]
FOLDERS = (
    "memhier", "ann/zoom", "ann/decoder", "recsys/embedding", "recsys/replay", "benchmarks",
)  # fmt: skip
PARAMETERS = 7
Function = ast.FunctionDef | ast.AsyncFunctionDef
Graph = dict[str, set[str]]


@cache
def sources(*packages: str) -> dict[Path, ast.Module]:
    """Return the syntax tree of each Python file in `packages`, by its path from the root."""
    found = {}
    for package in packages:
        for file in sorted((ROOT / package).rglob("*.py")):
            # memhier holds symlinks to its siblings: a file belongs to the folder that holds it.
            if file.resolve() == file and "__pycache__" not in file.parts:
                found[file.relative_to(ROOT)] = ast.parse(file.read_text(), str(file))
    return found


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts if parts[0] == "memhier" else ("memhier", *parts)).removesuffix(".__init__")


def _imports(node: ast.AST, modules: Graph) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                yield full if full in modules else child.module
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        else:
            yield from _imports(child, modules)


@cache
def _graph() -> Graph:
    """Return the modules of the product and of the benchmarks, each with the modules that it imports."""
    trees = sources(*PACKAGES)
    graph: Graph = {_dotted(path): set() for path in trees}
    for path, tree in trees.items():
        name = _dotted(path)
        graph[name] = {found for found in _imports(tree, graph) if found in graph} - {name}
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of nodes that reach each other (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[-len(group) :]
            if len(group) > 1:
                circles.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return circles


def floors(graph: Graph) -> int:
    """Return the nodes on the longest path; a circle ends the path."""
    height: dict[str, int] = {}

    def climb(node: str, below: frozenset[str]) -> int:
        if node not in height:
            others = graph[node] - below
            height[node] = 1 + max((climb(other, below | {node}) for other in others), default=0)
        return height[node]

    return max((climb(node, frozenset({node})) for node in sorted(graph)), default=0)


def _rooms(folder: str) -> Graph:
    """Return the rooms directly inside a folder, each with the rooms that it imports."""
    base = _dotted(Path(folder) / "__init__.py")
    graph: Graph = defaultdict(set)

    def room(module: str) -> str | None:
        inside = module.removeprefix(base + ".") if module.startswith(base + ".") else ""
        head = inside.partition(".")[0]
        return None if not head or (base == "memhier" and head in PACKAGES) else head

    for module, imported in _graph().items():
        here = room(module)
        if here is not None:
            graph[here] |= {there for there in map(room, imported) if there is not None} - {here}
    return dict(graph)


def shape(folder: str) -> dict[str, int]:
    """Return the numbers of rooms, floors, arrows and circles directly inside a folder."""
    graph = _rooms(folder)
    arrows = sum(map(len, graph.values()))
    return {"rooms": len(graph), "floors": floors(graph), "arrows": arrows, "circles": len(circles(graph))}


def _crowd() -> tuple[int, str]:
    """Return the number of files in the fullest folder of code, and its name."""
    files = [
        file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.suffix in (".py", ".cpp", ".hpp")
    ]
    folders = Counter(file.parent for file in files if file.resolve() == file)
    folder, number = folders.most_common(1)[0]
    return number, str(folder.relative_to(ROOT))


def _private(*packages: str) -> int:
    """Return the number of places that reach for an underscore member of an object other than self."""
    nodes = (node for tree in sources(*packages).values() for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return sum(
        bool(re.match(r"_[a-z]", node.attr))
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in nodes
    )


def _words() -> dict[str, float]:
    """Return how often docstrings use a word, in 1,000 words."""
    total, found = 0, Counter[str]()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for tree in sources(*PACKAGES).values():
        for node in ast.walk(tree):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                words = re.findall(r"[a-z']+", text.partition(">>>")[0].lower())
                total += len(words)
                found.update(word for word in words if word in ("what", "who", "whom", "nobody", "somebody"))
    what = found.pop("what", 0)
    return {"'what' in 1,000 words": 1_000 * what / total, "'who' in 1,000 words": 1_000 * found.total() / total}


def _wide_functions() -> int:
    """Return the number of functions with more than seven parameters that a call may give by position."""
    functions = (node for tree in sources(*PRODUCT).values() for node in ast.walk(tree) if isinstance(node, Function))
    return sum(len(_parameters(node)) > PARAMETERS for node in functions)


def _parameters(function: Function) -> list[str]:
    """Return the parameters that a call may give by position, without ``self``."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return [name for name in names if name not in ("self", "cls")]


def _split_classes() -> list[str]:
    """Return the classes that another file continues: one subclass, in the same folder, and no interface."""
    homes, bases = {}, defaultdict(list)
    for path, tree in sources(*PRODUCT).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                parents = [ast.unparse(base).partition("[")[0] for base in node.bases]
                homes[node.name] = (path, parents)
                for parent in parents:
                    bases[parent].append((node.name, path))
    return sorted(
        f"{name} in {homes[name][0]} and {children[0][1].name}"
        for name, children in bases.items()
        if name in homes
        and len(children) == 1
        and children[0][1] != homes[name][0]
        and children[0][1].parent == homes[name][0].parent
        and not {"Protocol", "ABC"} & set(homes[name][1])
    )


def _lines(*packages: str) -> int:
    return sum(len((ROOT / path).read_text().splitlines()) for path in sources(*packages))


def _hidden() -> int:
    """Return the number of public names that ``dir`` does not show."""
    import memhier
    import memhier.ann
    import memhier.recsys

    packages = (memhier, memhier.ann, memhier.recsys)
    return sum(name not in dir(package) for package in packages for name in package.__all__)


def counts() -> dict[str, float]:
    """Return each count by its name; less is better for all of them."""
    measures: dict[str, Callable[[], float]] = {
        "circles of modules": lambda: len(circles(_graph())),
        "circles of rooms": lambda: sum(shape(folder)["circles"] for folder in FOLDERS),
        "files in the fullest folder": lambda: _crowd()[0],
        "private accesses, product": lambda: _private(*PRODUCT),
        "private accesses, tests": lambda: _private("tests"),
        "classes continued by a subclass": lambda: len(_split_classes()),
        "functions of over 7 positional parameters": _wide_functions,
        "names that dir() hides": _hidden,
        "lines of the product": lambda: _lines(*PRODUCT),
        "lines of the benchmarks": lambda: _lines("benchmarks"),
    }
    return {name: measure() for name, measure in measures.items()} | _words()


def grown(found: dict[str, float], limits: dict[str, float] = LIMITS) -> list[str]:
    """Return a line for each count above its limit."""
    return [
        f"{name}: {found[name]:,.4g}, at most {limit:,.4g}" for name, limit in limits.items() if found[name] > limit
    ]


def main() -> int:
    """Print the counts; return 1 if one grew."""
    for folder in FOLDERS:
        print(f"{folder:20}", *(f"{number:4} {name}" for name, number in shape(folder).items()))
    found = counts()
    for name, number in found.items():
        limit = f"  at most {LIMITS[name]:,.6g}" if name in LIMITS else ""
        print(f"{name:45} {number:8,.6g}{limit}")
    print("the fullest folder:", _crowd()[1])
    print(*(f"a circle of modules: {', '.join(circle)}" for circle in circles(_graph())), sep="\n")
    for folder in FOLDERS:
        print(*(f"a circle of rooms in {folder}: {', '.join(c)}" for c in circles(_rooms(folder))), sep="\n")
    print(*(f"continued by a subclass: {line}" for line in _split_classes()), sep="\n")
    complaints = grown(found)
    print(*(f"GREW: {line}" for line in complaints), sep="\n")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())

"""The functions, methods and classes of one Python file, each with the first sentence of its docstring held out."""

import ast
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import decode_source
from pathlib import Path
from typing import TypeAlias

from memhier.benchmarks.cli.demo.sources import SourceFile

__all__ = ["Function", "extract", "split_first_sentence"]

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

# Generated tables run to megabytes in one function; the purpose of a function stands near its top.
CODE_CHARS_MAX = 4000
SIGNATURE_CHARS_MAX = 400

# A full stop ends a sentence when space follows, unless it closes an abbreviation.
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\betc)(?<!\bcf)(?<!\bvs)[.!?](?=\s|$)")


@dataclass(frozen=True, slots=True)
class Function:
    """A function, method or class as the demo indexes it.

    Attributes
    ----------
    name
        Dotted name from the module down, such as ``json.decoder.JSONDecoder.decode``.
    signature
        The text between the decorators and the body, on one line.
    path, line
        The place of the definition; lines count from 1.
    sentence
        The first sentence of the docstring, held out: neither `documentation` nor `code` contains it. Empty without
        a docstring.
    documentation
        The rest of the docstring, on one line.
    code
        The source without docstrings, on one line, cut at 4,000 characters. A class keeps the signatures of its
        methods but not their bodies, which are functions of their own.
    """

    name: str
    signature: str
    path: str
    line: int
    sentence: str
    documentation: str
    code: str


def split_first_sentence(docstring: str) -> tuple[str, str]:
    """Return the first sentence of a docstring and all the rest, both on one line.

    A first paragraph without a full stop is one sentence.

    Examples
    --------
    >>> split_first_sentence("Parse a date, e.g. today.  Slow.\\n\\n    More.")
    ('Parse a date, e.g. today.', 'Slow. More.')
    """
    paragraph, _, rest = inspect.cleandoc(docstring).partition("\n\n")
    paragraph = _one_line(paragraph)
    end = _SENTENCE_END.search(paragraph)
    cut = end.end() if end else len(paragraph)
    return paragraph[:cut], _one_line(f"{paragraph[cut:]} {rest}")


def extract(file: SourceFile) -> list[Function] | None:
    """Return the definitions of a file in the order of their lines, or None when it cannot be read as Python.

    Nothing is imported or run.
    """
    try:
        # Decodes as the parser does, by the byte order mark or the coding line, and leaves \n as the only line end,
        # so that the positions of the tree are positions in the text.
        text = decode_source(Path(file.path).read_bytes())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are the authors' business
            tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    lines = text.split("\n")
    return [_describe(node, f"{file.module}.{name}", file.path, lines) for name, node in _definitions(tree)]


def _definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Yield every definition with its qualified name, in source order, without recursion."""
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        prefix, node = stack.pop()
        if isinstance(node, DEFINITIONS):
            yield prefix + node.name, node
            prefix += f"{node.name}."
        stack.extend((prefix, child) for child in reversed(_blocks(node)))


def _blocks(node: ast.AST) -> list[ast.AST]:
    """Return the statements, handlers and cases directly under a node; definitions stand nowhere else."""
    fields = ("body", "cases", "handlers", "orelse", "finalbody")
    return [child for name in fields if isinstance(block := getattr(node, name, None), list) for child in block]


def _describe(node: Definition, name: str, path: str, lines: list[str]) -> Function:
    docstring = ast.get_docstring(node, clean=False)
    sentence, documentation = split_first_sentence(docstring) if docstring else ("", "")
    code = _one_line(_source_without(node, list(_hidden(node)), lines))[:CODE_CHARS_MAX]
    return Function(
        name=name,
        signature=_signature(node)[:SIGNATURE_CHARS_MAX],
        path=path,
        line=node.lineno,
        sentence=sentence,
        documentation=_cut(documentation, sentence),
        code=_cut(code, sentence),
    )


def _hidden(node: Definition) -> Iterator[ast.stmt]:
    """Yield the statements left out of a definition's code: docstrings, and in a class the bodies of its methods."""
    stack: list[ast.AST] = [node]
    while stack:
        inner = stack.pop()
        if isinstance(inner, DEFINITIONS):
            if isinstance(node, ast.ClassDef) and inner is not node:
                yield from inner.body
                continue
            if ast.get_docstring(inner, clean=False) is not None:
                yield inner.body[0]
        stack.extend(_blocks(inner))


def _source_without(node: Definition, hidden: list[ast.stmt], lines: list[str]) -> str:
    """Return the source of a definition, decorators included, without some of its statements."""
    kept = []
    line, column = min([node.lineno, *(d.lineno for d in node.decorator_list)]), 0
    for statement in sorted(hidden, key=lambda s: (s.lineno, s.col_offset)):
        kept.append(_span(lines, line, column, statement.lineno, statement.col_offset))
        assert statement.end_lineno is not None
        assert statement.end_col_offset is not None
        line, column = statement.end_lineno, statement.end_col_offset
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    kept.append(_span(lines, line, column, node.end_lineno, node.end_col_offset))
    return "\n".join(kept)


def _span(lines: list[str], line: int, column: int, end_line: int, end_column: int) -> str:
    """Return the text between two positions as `ast` counts them: lines from 1, columns in bytes of UTF-8."""
    if (line, column) >= (end_line, end_column):
        return ""
    last = _head(lines[end_line - 1], end_column)
    if line == end_line:
        return last[len(_head(lines[line - 1], column)) :]
    first = lines[line - 1]
    return "\n".join([first[len(_head(first, column)) :], *lines[line : end_line - 1], last])


def _head(text: str, size: int) -> str:
    return text[:size] if text.isascii() else text.encode()[:size].decode(errors="ignore")


def _signature(node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join([ast.unparse(base) for base in node.bases] + [ast.unparse(word) for word in node.keywords])
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{keyword} {node.name}({ast.unparse(node.args)}){returns}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cut(text: str, sentence: str) -> str:
    """Remove a sentence wherever it stands; removing one copy can bring the halves of another together."""
    while sentence and sentence in text:
        text = _one_line(text.replace(sentence, " "))
    return text

"""The definitions that the demo reads from source files: their positions, and a first sentence that is gone."""

import ast
import codecs
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memhier.benchmarks.cli.demo.extract import Function, extract, split_first_sentence
from memhier.benchmarks.cli.demo.sources import SourceFile, fingerprint, installed_roots, source_files

SOURCE = '''\
"""The module's own docstring is no function's."""
import functools

@functools.lru_cache(
    maxsize=3)
def outer(a, /, b: int = 1, *args, c=(2, 3), **kwargs) -> "dict[str, int]":
    """Add things up, e.g. numbers. The rest stays.

    More to say.
    """
    def inner(x):
        """Hidden sentence of the inner one."""
        return x + 1
    return inner(a)

class Shape(Base, metaclass=Meta):
    """A closed outline"""
    sides = 0

    async def area(self): "Measure the inside"; return self.sides * 17

    @property
    def name(self):
        # Measure the outside
        return "shape"

    class Corner:
        pass

if True:
    try:
        def conditional(): pass
    except ImportError:
        def fallback(): pass
    else:
        for _ in ():
            while False:
                def looped(): ...
match 3:
    case 3:
        def matched(): ...
'''


def read(folder: Path, source: str | bytes, module: str = "pkg.mod") -> list[Function] | None:
    file = folder / "mod.py"
    file.write_bytes(source.encode() if isinstance(source, str) else source)
    return extract(SourceFile(str(file), module))


def by_name(functions: list[Function] | None) -> dict[str, Function]:
    assert functions is not None
    return {function.name.removeprefix("pkg.mod."): function for function in functions}


def test_every_definition_with_its_name_and_line_in_order(tmp_path: Path) -> None:
    functions = by_name(read(tmp_path, SOURCE))
    assert list(functions) == [
        "outer", "outer.inner", "Shape", "Shape.area", "Shape.name", "Shape.Corner",
        "conditional", "fallback", "looped", "matched",
    ]  # fmt: skip
    lines = SOURCE.splitlines()
    for name, function in functions.items():
        own = name.rpartition(".")[2]
        assert f"def {own}(" in lines[function.line - 1] or f"class {own}" in lines[function.line - 1]


def test_signatures_stand_on_one_line(tmp_path: Path) -> None:
    functions = by_name(read(tmp_path, SOURCE))
    assert functions["outer"].signature == "def outer(a, /, b: int=1, *args, c=(2, 3), **kwargs) -> 'dict[str, int]'"
    assert functions["Shape"].signature == "class Shape(Base, metaclass=Meta)"
    assert functions["Shape.area"].signature == "async def area(self)"
    assert functions["Shape.Corner"].signature == "class Corner"


def test_code_keeps_decorators_and_loses_docstrings(tmp_path: Path) -> None:
    functions = by_name(read(tmp_path, SOURCE))
    outer = functions["outer"]
    assert outer.code.startswith("@functools.lru_cache( maxsize=3) def outer(")
    assert outer.code.endswith("def inner(x): return x + 1 return inner(a)")
    assert (outer.sentence, outer.documentation) == ("Add things up, e.g. numbers.", "The rest stays. More to say.")
    area = functions["Shape.area"]
    assert area.sentence == "Measure the inside"
    assert area.code == "async def area(self): ; return self.sides * 17"


def test_a_class_keeps_the_signatures_of_its_methods_and_not_their_bodies(tmp_path: Path) -> None:
    code = by_name(read(tmp_path, SOURCE))["Shape"].code
    assert "sides = 0" in code
    assert "async def area(self):" in code
    assert "@property def name(self):" in code
    assert "17" not in code
    assert "inside" not in code
    assert "closed outline" not in code


@pytest.mark.parametrize(
    "source",
    [
        b"def f(:\n", b"print 'python 2'\n", b"# coding: nonsense\ndef f(): pass\n", b"def f(): '\xff'\n",
        b"def f(): \0",
        b"\t\n  def f(): pass\n", codecs.BOM_UTF8 + b"# coding: latin-1\ndef f(:", b"x = " + b"(" * 5000,
    ],
)  # fmt: skip
def test_what_is_not_python_of_this_version_is_left_out(tmp_path: Path, source: bytes) -> None:
    assert read(tmp_path, source) is None


def test_a_file_that_cannot_be_opened_is_left_out(tmp_path: Path) -> None:
    assert extract(SourceFile(str(tmp_path / "gone.py"), "gone")) is None


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "") == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "cp1252"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_encodings_and_line_ends(tmp_path: Path, encoding: str, newline: str) -> None:
    declared = encoding.removesuffix("-sig")
    source = f"# coding: {declared}\n\ndef grüße(é): 'Ünique é doc. Rest ü.'; return 'ß'\n\n\ndef last():\n    ü = 1\n"
    functions = by_name(read(tmp_path, source.replace("\n", newline).encode(encoding)))
    greet = functions["grüße"]
    assert (greet.sentence, greet.documentation) == ("Ünique é doc.", "Rest ü.")
    assert (greet.code, greet.line) == ("def grüße(é): ; return 'ß'", 3)
    assert (functions["last"].code, functions["last"].line) == ("def last(): ü = 1", 6)


def test_form_feeds_and_odd_separators_do_not_shift_lines(tmp_path: Path) -> None:
    functions = by_name(read(tmp_path, "x = '\u2028\x85'\n\x0c\ndef f():\n    '''One.'''\n    return 7\n"))
    assert functions["f"].code == "def f(): return 7"


sentences = st.lists(
    st.sampled_from(["alpha", "beta", "beta.", "e.g.", "is", '"', "é", "  ", "\n", "\n\n"]), max_size=9
)


@given(first=sentences, rest=sentences, copies=st.lists(sentences, max_size=3))
def test_the_held_out_sentence_is_nowhere_in_what_is_indexed(
    tmp_path_factory: pytest.TempPathFactory, first: list[str], rest: list[str], copies: list[list[str]]
) -> None:
    docstring = " ".join([*first, ".", *rest])
    comments = "\n".join(f"    # {' '.join(' '.join(copy).split())} {' '.join(docstring.split())}" for copy in copies)
    source = f"def f():\n    {docstring!r}\n{comments}\n    return {docstring!r}, '''{docstring} '''\n"
    function = by_name(read(tmp_path_factory.mktemp("held"), source))["f"]
    if function.sentence:
        assert function.sentence not in function.documentation
        assert function.sentence not in function.code


def test_no_sentence_of_the_standard_library_is_indexed() -> None:
    json_folder = Path(ast.__file__).parent / "json"
    functions = [f for file in source_files([json_folder]) for f in extract(file) or ()]
    held_out = [function for function in functions if function.sentence]
    assert len(held_out) > 10
    for function in held_out:
        assert function.sentence not in function.documentation
        assert function.sentence not in function.code


@given(st.text(st.sampled_from("ab .!?\n\té"), max_size=60))
def test_sentence_and_rest_are_the_docstring(text: str) -> None:
    sentence, rest = split_first_sentence(text)
    assert f"{sentence} {rest}".split() == text.split() or not text.split()
    assert "  " not in sentence + rest
    assert "\n" not in sentence + rest


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("One. Two.", "One."), ("No full stop\n\nMore", "No full stop"), ("Over\n   lines! More", "Over lines!"),
        ("Use x.y, i.e. this. Not that.", "Use x.y, i.e. this."), ("", ""), ("   ", ""),
        ("v1.2 is out. So?", "v1.2 is out."),
    ],
)  # fmt: skip
def test_first_sentences(docstring: str, sentence: str) -> None:
    assert split_first_sentence(docstring)[0] == sentence


def test_files_come_in_order_without_tests_and_without_other_roots(tmp_path: Path) -> None:
    for name in (
        "b/__init__.py", "b/z.py", "b/a.py", "a.py", "b/tests/t.py", "test/t.py", "site-packages/p.py", "b/data.txt",
        "__pycache__/c.py", "__editable___pkg_finder.py", "_pkg_editable.py",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [file.module for file in source_files([tmp_path])] == ["a", "b", "b.a", "b.z"]


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere")

    def now() -> str:
        return fingerprint(source_files([tmp_path]))

    first = now()
    assert now() == first
    (tmp_path / "a.py").write_text("x = 10\n")
    second = now()
    (tmp_path / "b.py").write_text("")
    assert len({first, second, now()}) == 3


def test_the_roots_hold_the_standard_library_and_the_packages() -> None:
    roots = installed_roots()
    assert len(set(roots)) == len(roots)
    assert any((root / "json" / "__init__.py").exists() for root in roots)
    assert any((root / "numpy" / "__init__.py").exists() for root in roots)


def test_halves_that_meet_when_a_sentence_is_cut_are_cut_too(tmp_path: Path) -> None:
    function = by_name(read(tmp_path, "def f():\n    '''A b.\n\n    So A A b. b. it goes.'''\n"))["f"]
    assert function.documentation == "So it goes."

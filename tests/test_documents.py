"""The blocks of README and docs: each runs alone, as printed, and a second time; commands that are not run exist."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("documents", ROOT / "tests/house/documents.py")
assert _spec is not None
assert _spec.loader is not None
documents: Any = importlib.util.module_from_spec(_spec)
sys.modules["documents"] = documents  # a dataclass looks itself up there
_spec.loader.exec_module(documents)

PAGES = documents.PAGES
SHELL = [block for page in PAGES for block in documents.blocks_of(page, "shell")]
RUN = [block for block in SHELL if documents.not_run(block) is None]
# Libraries that the environment of the tests lacks. `make test-plugins` runs these blocks with the first group; the
# peers of the guides to move from them clash with each other, so their blocks run where one of them is installed.
ADAPTED = (
    "avalanche",
    "datasets",
    "fastapi",
    "langchain_core",
    "lightning",
    "llama_index",
    "ray",
    "sklearn",
    "torchrl",
)
PEERS = ("chromadb", "diskannpy", "hnswlib", "lancedb", "torchrec", "usearch")

# Beside a torch that is not its own, torchvision lacks operators that it asks for at import; Avalanche asks for wandb.
STAND_INS = """
import contextlib, sys, types, torch
with contextlib.suppress(RuntimeError):
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor a, Tensor b, float c) -> Tensor")
wandb = types.ModuleType("wandb")
wandb.__spec__ = types.SimpleNamespace(name="wandb")
sys.modules.setdefault("wandb", wandb)
"""

# One process for all blocks of a page: each has names and a folder of its own, and runs twice.
RUN_TWICE = """
import json, os, sys
for place, code in json.loads(sys.stdin.read()):
    os.makedirs(place)
    os.chdir(place)
    compiled = compile(code, place, "exec")
    for time in ("first", "second"):
        print(f"-- {place}, {time} time", file=sys.stderr)
        exec(compiled, {"__name__": "__main__"})
"""


def libraries_of(block: Any) -> set[str]:
    """Return the libraries outside the environment of the tests that a block imports."""
    imported = set(re.findall(r"^(?:from|import) (\w+)", block.code, re.MULTILINE))
    own = re.findall(r"^from memhier\.(?:ann|recsys)\.(\w+) import", block.code, re.MULTILINE)
    named = {"cluster": "ray", "langchain": "langchain_core", "serving": "fastapi"}
    return (imported | {named.get(name, name) for name in own}) & {*ADAPTED, *PEERS}


PYTHON = {page: [b for b in documents.blocks_of(page, "python") if not libraries_of(b)] for page in PAGES}
WITH_LIBRARIES = [b for page in PAGES for b in documents.blocks_of(page, "python") if libraries_of(b)]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON[page]], ids=name_of)
def test_python_blocks_run_alone_and_again(page, tmp_path):
    blocks = [[str(tmp_path / f"line{block.line}"), block.code] for block in PYTHON[page]]
    command = [sys.executable, "-W", "error", "-c", RUN_TWICE]
    run = subprocess.run(
        command, cwd=tmp_path, input=json.dumps(blocks), capture_output=True, text=True, timeout=800, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("block", WITH_LIBRARIES, ids=str)
def test_blocks_with_another_library_run_alone_and_again(block, tmp_path):
    for library in libraries_of(block):
        found = importlib.util.find_spec(library)
        if found is None or (library == "ray" and found.origin is None):  # Ray leaves a folder of its name in /tmp
            pytest.skip(f"{block} needs {library}")
    if os.environ.get("MEMHIER_PLUGINS") is not None:
        block = dataclasses.replace(block, code=STAND_INS + block.code)
    done = documents.run(block, Path(sys.executable), tmp_path / "here")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("block", RUN, ids=str)
def test_shell_blocks_run_alone_and_again(block, tmp_path):
    done = documents.run(block, Path(sys.executable), tmp_path / "here")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell_blocks_are_well_formed(block):
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_reason_not_to_run_a_block_has_one():
    reasons = {documents.not_run(block) for block in SHELL}
    assert reasons == {None, *documents.NOT_RUN.values()}


@functools.cache
def options_of(module: str) -> str:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wrong_in_memhier(words: list[str]) -> list[str]:
    """Return the words of a memhier command line that are no command, option, workload or peer."""
    import click

    from memhier.benchmarks.bench.workload import load_workloads
    from memhier.benchmarks.cli.main import main

    command: click.Command = main
    rest = list(words)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-") and not rest[0].isupper():
        found = command.get_command(click.Context(command), rest[0])
        if found is None:
            return rest[:1]
        command = found
        rest.pop(0)
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    wrong = [word for word in rest if word.startswith("-") and word.partition("=")[0] not in known | {"--help", "-h"}]
    if words[:2] == ["bench", "run"]:
        workloads = {load.name: load for load in load_workloads()}
        peers = {name for load in workloads.values() for peer in load.peers for name in (peer.name, peer.adapter)}
        names = [word for word, before in zip(words[2:], words[1:], strict=False) if not before.startswith("-")]
        wrong += [name for name in names if not name.startswith("-") and name not in workloads]
        wrong += [
            word for word, before in zip(words[1:], words, strict=False) if before == "--peer" and word not in peers
        ]
    return wrong


def wrong_in(words: list[str]) -> list[str]:
    """Return the words of a command line that name nothing: targets, extras, files, modules, commands or options."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    program = Path(words[0]).name if words else ""
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [word for word in words[1:] if "=" not in word and word not in targets]
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        return sorted(
            frozenset().union(*documents.extras_in(" ".join([*words[:2], *map(repr, words[2:])]))) - set(extras)
        )
    if program == "memhier":
        return wrong_in_memhier(words[1:])
    if program == "python" and words[1] == "-m" and words[2].startswith("memhier."):
        return [word for word in words[3:] if word.startswith("--") and word not in options_of(words[2])]
    if program == "python" and words[1].endswith(".py"):
        script = ROOT / words[1]
        source = script.read_text() if script.exists() else ""
        return [words[1]] * (not source) + [
            w for w in words[2:] if w.startswith("--") and f'"{w}"' not in source + '"--help"'
        ]
    return []


def command_lines(page: Path) -> list[list[str]]:
    """Return the command lines in shell blocks and in the text of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`((?:memhier|python|make|pip) [^`]*)`", text)
    codes = [block.code for block in documents.blocks_of(page, "shell")] + [" ".join(code.split()) for code in inline]
    return [words for code in codes for words in documents.commands(code)]


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if command_lines(page)], ids=name_of)
def test_commands_and_their_options_exist(page):
    wrong = {" ".join(words): found for words in command_lines(page) if (found := wrong_in(words))}
    assert wrong == {}


@pytest.mark.parametrize(
    "line",
    [
        "make no-such-target",
        "pip install '.[search,nothing]'",
        "memhier index find",
        "memhier index build a b --budget 3",
        "memhier bench run search-nothing",
        "memhier bench run search-sift --peer nothing",
        "python docs/examples/nothing.py",
        "python docs/examples/knn_lm.py --nothing",
        "python -m memhier.benchmarks.workloads.search.fields --nothing",
        "OMP_NUM_THREADS=1 .venv/bin/memhier probe . --nothing",
    ],
)
def test_commands_that_do_not_exist_are_found(line):
    (words,) = documents.commands(line)
    assert wrong_in(words)


def test_blocks_say_their_language():
    languages = {"python", "shell", "text", "{toctree}", "{eval-rst}"}
    unknown = [f"{block}: {block.language!r}" for page in PAGES for block in documents.blocks_of(page)
               if block.language not in languages]  # fmt: skip
    assert unknown == []


def test_readme_and_every_tutorial_have_blocks_and_say_what_to_install():
    for page in (ROOT / "README.md", *(ROOT / "docs/tutorials").glob("*.md")):
        blocks = documents.blocks_of(page, "python")
        assert blocks, page
        assert [str(block) for block in blocks if block.extras is None] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_figure_is_left_to_fill_in(page):
    assert re.search(r"@[A-Z]+@|TODO|TBD", page.read_text()) is None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []

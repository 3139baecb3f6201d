"""The blocks of code in README and docs: where they are, the extras that they need, and a run of one as printed."""

import os
import re
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NOT_RUN", "PAGES", "ROOT", "Block", "blocks_of", "commands", "extras_in", "not_run", "run"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Shell blocks with a command that begins so are not run: their syntax, targets, extras, commands and options are looked
# up.
NOT_RUN = {
    "make": "it installs packages from the network, or runs all tests",
    "pip": "it installs packages from the network; `make try-wheel` does so",
    "MEMHIER_NATIVE=0 python -m pytest": "it runs all tests",
    "memhier serve": "it serves until it is ended; tests/cluster/test_serving_process.py runs it",
    "memhier plan": "it measures for minutes, with files of the reader; tests/benchmarks/test_plan_command.py runs it",
    "torchrun": "it starts ranks on several machines; tests/recsys/test_embedding_torchrun.py does on this one",
    ".venv/bin/memhier demo": "it reads every installed package; tests/benchmarks/test_demo.py runs it on a few",
}

_FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INSTALL = re.compile(r"pip install (?:-\S+ )*(?:'\.\[([\w,]+)\]'|\.(?=[\s`]))")
_TWICE = """
import sys
code = compile(sys.stdin.read(), "block", "exec")
for _ in range(2):
    exec(code, {"__name__": "__main__"})
"""


@dataclass(frozen=True)
class Block:
    """A block of code: its page, first line and language, the code, and the extras of the install line above it."""

    page: str
    line: int
    language: str
    code: str
    extras: frozenset[str] | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def extras_in(text: str) -> list[frozenset[str]]:
    """Return the extras of each ``pip install`` of memhier in a text."""
    return [frozenset(filter(None, (found[1] or "").split(","))) for found in _INSTALL.finditer(text)]


def blocks_of(page: Path, language: str | None = None) -> list[Block]:
    """Return the blocks of a page, or those of a language, in their order."""
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        above = extras_in(text[: fence.start()])
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Block(page.relative_to(ROOT).as_posix(), line, fence[1], fence[2], above[-1] if above else None))
    return [block for block in found if language in (None, block.language)]


def commands(code: str) -> list[list[str]]:
    """Return the words of each command of a shell block, without comments."""
    lines = re.sub(r"\\\n\s*", "", code).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def not_run(block: Block) -> str | None:
    """Return why a shell block is not run, or None; other blocks are run."""
    if block.language != "shell":
        return None
    for command in commands(block.code):
        for start, reason in NOT_RUN.items():
            if f"{' '.join(command)} ".startswith((f"{start} ", f"{start}=")):
                return reason
    return None


def run(block: Block, python: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a block twice, with a Python and the commands beside it, in a new folder with the ``docs`` of the clone."""
    folder.mkdir(parents=True)
    (folder / "docs").symlink_to(ROOT / "docs")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST_"))}
    path = f"{python.parent}{os.pathsep}{environment.pop('PATH', clean.get('PATH', os.defpath))}"
    if block.language == "python":
        command, code = [str(python), "-c", _TWICE], block.code
    else:
        command, code = ["bash", "-euo", "pipefail", "-s"], f"({block.code}\n)\n({block.code}\n)"
    with subprocess.Popen(
        command, cwd=folder, env={**clean, **environment, "PATH": path}, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            output, errors = process.communicate(code, timeout=800)
        except BaseException:  # the commands of a shell would go on without it
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)

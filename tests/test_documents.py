"""The Python blocks of README and docs: each runs alone, as printed, and a second time in the same folder."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

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


def blocks_of(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=name_of)
def test_python_blocks_run_alone_and_again(page, tmp_path):
    blocks = [[str(tmp_path / f"block{number}"), code] for number, code in enumerate(blocks_of(page), 1)]
    command = [sys.executable, "-W", "error", "-c", RUN_TWICE]
    run = subprocess.run(
        command, cwd=tmp_path, input=json.dumps(blocks), capture_output=True, text=True, timeout=800, check=False
    )
    assert run.returncode == 0, run.stderr


def test_readme_and_every_tutorial_have_blocks():
    without = [name_of(page) for page in (ROOT / "README.md", *(ROOT / "docs/tutorials").glob("*.md"))
               if not blocks_of(page)]  # fmt: skip
    assert without == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_figure_is_left_to_fill_in(page):
    assert re.search(r"@[A-Z]+@|TODO|TBD", page.read_text()) is None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []

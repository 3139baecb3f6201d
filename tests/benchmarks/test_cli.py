"""The ``memhier`` command: its help, its manners and how little it imports."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from memhier.benchmarks.cli.main import COMMANDS, main


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name, (_, line) in COMMANDS.items():
        assert f"{name} " in result.output
        assert line in result.output


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: main {name}")
    assert name == "bench" or "--json" in result.output  # whose results are JSON lines, always


def test_help_imports_no_command() -> None:
    code = (
        "import sys, click\n"
        "from memhier.benchmarks.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'faiss', 'rich', 'lmdb', 'matplotlib', 'tqdm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_command_is_told_the_known_ones() -> None:
    result = CliRunner().invoke(main, ["demonstrate"])
    assert result.exit_code == 2
    assert "there is no command 'demonstrate': expected one of demo, probe" in result.output


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert "version" in result.output

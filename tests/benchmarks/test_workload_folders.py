"""``--dir`` of a workload that names no folder is told in one line, before anything is made."""

from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from memhier.benchmarks.bench.workload import FOLDER

NAMES = sorted(
    ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if '"--dir"' in path.read_text() or "folder_option" in path.read_text()
)


def command_of(name: str) -> Any:
    """Return the command of a script, None where it has none."""
    module = import_module(f"memhier.benchmarks.workloads.{name}")
    commands = [found for found in vars(module).values() if isinstance(found, click.Command)]
    return commands[0] if commands else None


@pytest.mark.parametrize("name", [name for name in NAMES if name != "options"])
def test_a_folder_that_is_not_there(name: str, tmp_path: Path) -> None:
    for place in (tmp_path / "missing", tmp_path / "file"):
        (tmp_path / "file").touch()
        result = CliRunner().invoke(command_of(name), ["--dir", str(place)])
        assert result.exit_code == 2, result.output
        assert str(place) in " ".join(result.output.split())
        assert "--dir" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

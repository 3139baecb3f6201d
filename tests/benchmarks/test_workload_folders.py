"""``--dir`` of a workload that names no folder is told in one line, before anything is made."""

from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from memhier.benchmarks.bench.workload import FOLDER, load_workloads

SCRIPTS = sorted(
    ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if "\n@workload\n" in path.read_text()
)


NAMES = sorted(
    {
        load.parameters["module"]
        for load in load_workloads()
        if load.function == "script" and load.parameters.get("on_device", False)
    }
)


def command_of(name: str) -> click.Command:
    """Return the command of a workload."""
    found = import_module(f"memhier.benchmarks.workloads.{name}").main
    assert isinstance(found, click.Command)
    return found


def takes_folder(name: str) -> bool:
    return any(option.name == "folder" for option in command_of(name).params)


def test_every_workload_is_among_them() -> None:
    wanted = {load.parameters["module"] for load in load_workloads() if load.function == "script"}
    assert wanted == set(SCRIPTS)
    for load in load_workloads():
        if load.function == "script":
            assert takes_folder(load.parameters["module"]) == load.parameters.get("on_device", False), load.name


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_is_not_there(name: str, tmp_path: Path) -> None:
    for place in (tmp_path / "missing", tmp_path / "file"):
        (tmp_path / "file").touch()
        result = CliRunner().invoke(command_of(name), ["--dir", str(place)])
        assert result.exit_code == 2, result.output
        assert str(place) in " ".join(result.output.split())
        assert "--dir" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

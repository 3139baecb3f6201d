"""``memhier doctor``: its findings on a good machine, and on broken ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from memhier.benchmarks.cli.doctor import checks
from memhier.benchmarks.cli.main import main
from memhier.io.reader import ENGINES, Reader
from memhier.store.store import Store


def findings(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(main, ["doctor", "--seconds", "0", "--json", "-", *arguments])
    told = json.loads(result.stdout)
    assert told["broken"] == sum(each["state"] == "bad" for each in told["findings"])
    assert (result.exit_code == 1) == (told["broken"] > 0)
    return result.exit_code, {each["name"]: each for each in told["findings"]}


def test_a_machine_that_runs_the_tests_is_not_broken(tmp_path: Path) -> None:
    code, found = findings(str(tmp_path))
    assert code == 0, found
    with Reader() as reader:
        assert found["I/O engine"]["words"].startswith(reader.engine)
        assert {f"engine {name}" for name in ENGINES if name != reader.engine} <= set(found)
    assert {"python", "memhier", "numpy", "lmdb", "core", "processor", "open files", "direct I/O", "commit"} <= set(
        found
    )
    assert [*tmp_path.iterdir()] == []


def test_a_device_is_measured_and_a_file_only_read(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(1 << 23))
    result = CliRunner().invoke(main, ["doctor", str(file), "--seconds", "0.05"])
    assert result.exit_code == 0, result.output
    assert "reads a second, 32 in flight" in result.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["data"]


def test_a_place_where_no_store_can_be_made_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", "store")

    monkeypatch.setattr(Store, "create", refuse)
    code, found = findings(str(tmp_path))
    assert (code, found["commit"]["words"]) == (1, "store: Read-only file system")


def test_a_check_that_fails_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no such counter")

    monkeypatch.setattr(checks, "mount_of", fail)
    code, found = findings(str(tmp_path))
    assert code == 1
    assert "no such counter" in [each["words"] for each in found.values()]


@pytest.mark.parametrize(
    ("environment", "code", "name", "words"),
    [
        ({"MEMHIER_NATIVE": "0"}, 0, "core", "pure Python, as MEMHIER_NATIVE=0 asks for"),
        ({"MEMHIER_IO": "threads"}, None, "I/O engine", "threads, as MEMHIER_IO=threads asks for"),
        ({"MEMHIER_IO": "tape"}, 1, "I/O engine", "MEMHIER_IO='tape': expected one of"),
    ],
)
def test_what_the_environment_asks_for_is_told(
    environment: dict[str, str], code: int | None, name: str, words: str, tmp_path: Path
) -> None:
    if environment.get("MEMHIER_IO") == "threads" and checks.backend.core is None:
        pytest.skip("the compiled core has this engine")
    command = [sys.executable, "-c", "from memhier.benchmarks.cli.main import main; main()"]
    done = subprocess.run(
        [*command, "doctor", str(tmp_path), "--seconds", "0", "--json", "-"],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert done.returncode == (code or 0), done.stderr
    assert words in found[name]["words"]

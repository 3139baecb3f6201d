"""The command ``memhier replay``."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memhier.benchmarks.cli.main import main
from memhier.recsys.replay import CarouselBuffer, Field, RandomSwap


@pytest.fixture
def place(tmp_path: Path) -> Path:
    schema = {"x": ("int64", 2), "text": Field("uint8", (None,), longest=4)}
    with CarouselBuffer(tmp_path / "b", memory=10, schema=schema, swap=RandomSwap(0.25), seed=4) as buffer:
        numbers = np.arange(50)
        batch = {"x": np.stack([numbers, -numbers], axis=1), "text": [b"abcd"[: number % 5] for number in range(50)]}
        buffer.add(batch, labels=numbers % 3, ids=numbers + 100)
        buffer.feedback(buffer.sample(4))
        buffer.checkpoint()
    return tmp_path / "b"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


def test_info(place: Path) -> None:
    done = run("info", place, "--json", "-")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.output)
    assert figures["samples"] == figures["arrivals"] == 50
    assert (figures["in_memory"], figures["slots"], figures["step"], figures["classes"]) == (10, 10, 1, 3)
    assert figures["swaps"] == "random 0.25"
    assert "text" in run("info", place).output


def test_what_somebody_else_trains_with_can_be_looked_at(place: Path) -> None:
    with CarouselBuffer.open(place):
        assert run("info", place).exit_code == 0
        assert run("check", place).exit_code == 0


def test_check_finds_damage(place: Path) -> None:
    done = run("check", place)
    assert done.exit_code == 0, done.output
    assert "50 samples" in done.output
    file = next(file for file in (place / "segments").iterdir() if file.name.startswith("samples-0."))
    data = bytearray(file.read_bytes())
    data[10] ^= 255
    file.write_bytes(data)
    done = run("check", place)
    assert done.exit_code == 1
    assert file.name in done.output


@pytest.mark.parametrize("memory", [False, True])
def test_export(place: Path, tmp_path: Path, memory: bool) -> None:
    done = run("export", place, tmp_path / "out", *(["--memory"] if memory else []))
    assert done.exit_code == 0, done.output
    found = {file.stem: np.load(file) for file in (tmp_path / "out").iterdir()}
    assert set(found) == {"x", "text", "text.length", "labels", "ids"}
    assert len(found["ids"]) == (10 if memory else 50)
    assert (found["x"][:, 0] == found["ids"] - 100).all()
    assert (found["labels"] == found["x"][:, 0] % 3).all()
    assert (found["text.length"] == found["x"][:, 0] % 5).all()
    assert run("export", place, tmp_path / "out").exit_code == 1


def test_doctor(place: Path, tmp_path: Path) -> None:
    done = run("doctor", place, "--batch", 8, "--step-ms", 1e6, "--seconds", 0.1, "--json", "-")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.output)
    assert figures["verdict"] == "keeps up"
    assert (figures["samples_read_a_step"], figures["sustained_ratio"], figures["waits"]) == (4, 1, 0)
    done = run("doctor", tmp_path, "--step-ms", 1e-3, "--sample-bytes", 3000, "--seconds", 0.1, "--json", "-")
    figures = json.loads(done.output)
    assert figures["verdict"].startswith("too slow: 100.0 %")
    assert figures["sustained_ratio"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]
    assert run("doctor", place, "--batch", 51, "--step-ms", 1).exit_code == 2
    assert run("doctor", tmp_path, "--step-ms", 1).exit_code == 1
    assert (
        "nothing is swapped"
        in run("doctor", place, "--ratio", 0, "--batch", 8, "--step-ms", 1, "--seconds", 0.1).output
    )


def test_export_of_fields_named_as_what_lies_beside_them(tmp_path: Path) -> None:
    schema = {"labels": ("float32", 2), "ids": "int16"}
    with CarouselBuffer(tmp_path / "b", memory=4, schema=schema) as buffer:
        buffer.add({"labels": np.ones((6, 2), np.float32), "ids": np.arange(6, dtype=np.int16)}, labels=[7] * 6)
        buffer.checkpoint()
    done = run("export", tmp_path / "b", tmp_path / "out")
    assert done.exit_code == 0, done.output
    found = {file.stem: np.load(file) for file in (tmp_path / "out").iterdir()}
    assert found["labels"].tolist() == [[1, 1]] * 6
    assert found["ids"].dtype == np.int16
    assert found["buffer.labels"].tolist() == [7] * 6
    assert found["buffer.ids"].tolist() == list(range(6))

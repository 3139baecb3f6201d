"""The paper's table of replay: its grid, its cells that go on after a kill, its data sets, its command."""

import itertools
import json
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from memhier.benchmarks.bench.results import Results
from memhier.benchmarks.bench.script_group import run_script
from memhier.benchmarks.bench.workload import FOLDER, Workload
from memhier.benchmarks.datasets import Images, data_folder
from memhier.benchmarks.workloads.replay.paper import cells, table
from memhier.benchmarks.workloads.replay.paper.cells import Cell, Runs, Setting
from memhier.benchmarks.workloads.replay.paper.models import MODELS, cropped, plain, shifted
from memhier.benchmarks.workloads.replay.paper.streams import STREAMS, Stream
from memhier.recsys.replay.methods import METHODS

SETTING = Setting("tiny", "dense", 1, False, 2, None)


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Images:
    """Return images of six classes, which are a stream by the name of "tiny"."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    centres = random.uniform(40, 210, (6, 6, 6))

    def some(count: int) -> tuple[Any, Any]:
        labels = random.permutation(np.arange(count) % 6)
        pixels = np.clip(centres[labels] + random.normal(0, 40, (count, 6, 6)), 0, 255).astype(np.uint8)
        return pixels, labels

    found = Images(*some(240), *some(120))
    monkeypatch.setitem(STREAMS, "tiny", Stream(lambda _: found, 3, "dense", shifted))
    return found


class Killed(BaseException):
    """A kill, as far as a test can make one."""


def run_killed(folder: Path, cell: Cell, images: Images, name: str, call: int) -> None:
    """Run a cell that is killed at a call, counted from 0, of one of the functions of `cells`."""
    real, calls = getattr(cells, name), itertools.count()

    def killed(*arguments: Any) -> Any:
        if next(calls) == call:
            raise Killed
        return real(*arguments)

    with mock.patch.object(cells, name, killed), pytest.raises(Killed):
        Runs(folder).make(SETTING, cell, images)


@pytest.mark.parametrize("name", METHODS)
def test_a_killed_cell_goes_on_at_its_last_task(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(METHODS["GDumb"], "steps", 20)
    cell = Cell(name, 24, 1.0, 3.0, "random", 1)
    whole = Runs(tmp_path / "whole").make(SETTING, cell, images)
    for _ in range(2):  # once the second task is learned, and once the third is, each before it is kept
        run_killed(tmp_path / "killed", cell, images, "share_right", 1)
    runs = Runs(tmp_path / "killed")
    assert runs.finished(SETTING, cell) is None
    again = runs.make(SETTING, cell, images)
    assert {**again, "cpu_s": 0, "stall_s": 0} == {**whole, "cpu_s": 0, "stall_s": 0}
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["cells.jsonl"]


def test_a_cell_killed_before_its_first_task_begins_anew(tmp_path: Path, images: Images) -> None:
    cell = Cell("ER", 24, 0.5, None, "gate", 0)
    run_killed(tmp_path, cell, images, "_learner", 0)
    assert len([*tmp_path.iterdir()]) == 1
    assert 0 < Runs(tmp_path).make(SETTING, cell, images)["final"] <= 1


def test_a_cut_line_of_cells_costs_that_cell_alone(tmp_path: Path, images: Images) -> None:
    kept = [Cell("ER", 24, 0, None, "random", seed) for seed in range(2)]
    for cell in kept:
        Runs(tmp_path).make(SETTING, cell, images)
    file = tmp_path / "cells.jsonl"
    file.write_text(file.read_text()[:-30])
    runs = Runs(tmp_path)
    assert len(runs) == 1
    assert runs.finished(SETTING, kept[0]) is not None
    assert runs.finished(Setting("tiny", "dense", 1, False, 3, None), kept[0]) is None
    runs.make(SETTING, kept[1], images)
    assert len(Runs(tmp_path)) == 2


def test_the_grid_has_every_memory_and_ratio_and_the_rest_at_the_first() -> None:
    cells = table.grid(["ER", "RM"], [50, 20, None], [1.0, 0.0, 0.2], [None, 2.0], ["random", "gate"], 2)
    assert len(cells) == len(set(cells)) == 2 * 2 * (2 * 3 + 1 + 1 + 1)
    assert {cell.seed for cell in cells[: len(cells) // 2]} == {0}
    assert all(cell.storage is None and cell.swaps == "random" for cell in cells if not cell.ratio)
    assert {cell.ratio for cell in cells if cell.memory is None} == {0}
    assert {(cell.memory, cell.ratio) for cell in cells if cell.storage or cell.swaps == "gate"} == {(50, 1.0)}
    ways = {cell.way for cell in cells}
    assert ways == {"memory only", "all in DRAM", "20 % swapped", "100 % swapped", "100 % swapped, gate",
                    "100 % swapped, storage 2 x memory"}  # fmt: skip


def test_the_table_has_differences_by_seed_and_the_papers_figures() -> None:
    def row(memory: int | None, ratio: float, seed: int, final: float) -> dict[str, Any]:
        cell = Cell("DER++", memory, ratio, None, "random", seed)
        return {**vars(cell), "way": cell.way, "final": final, "incremental": 0.5, "cpu_s": 1.0}

    rows = [row(500, 0, 0, 0.5), row(500, 0, 1, 0.6), row(500, 1, 0, 0.7), row(500, 1, 1, 0.9), row(200, 1, 0, 0.4),
            row(None, 0, 0, 0.75)]  # fmt: skip
    alone, swapped, small, everything = table.lines(rows, "cifar10")
    assert swapped["over_memory_only"] == "+25.0 (+20.0 to +30.0)"
    assert swapped["over_all_in_DRAM"] == "-5.0 (-5.0 to -5.0)"
    assert swapped["final"] == "80.0 ± 14.1"
    assert [line["paper"] for line in (alone, swapped, small, everything)] == ["72.2", "90.6", "", ""]
    assert small["over_memory_only"] == everything["over_all_in_DRAM"] == ""
    record = table.record(rows, Setting("cifar10", "resnet", 16, True, 5, 10_000))
    gains = [figure for figure in record.figures if figure.paper]
    assert [figure.name for figure in gains] == ["cifar10, 500: DER++, 100 % swapped, gain at the end"]


def test_the_command_keeps_cells_and_refuses_to_mix_runs(tmp_path: Path, images: Images) -> None:
    words = ["--data", "mnist", "--model", "dense", "--width", "1", "--epochs", "1", "--samples", "200", "--methods",
             "ER", "--memories", "20", "--ratios", "1,0", "--storages", "none", "--swaps", "random", "--seeds", "1",
             "--runs", str(tmp_path / "runs")]  # fmt: skip
    run = CliRunner()
    told = run.invoke(table.main, [*words, "--new", "0"])
    if "no data set" in told.output or not (data_folder() / "mnist").is_dir():
        pytest.skip(f"MNIST is not in {data_folder()}")
    assert told.exit_code == 2
    assert "no cell is finished" in told.output
    assert run.invoke(table.main, [*words, "--new", "1"]).exit_code == 0
    told = run.invoke(table.main, words)
    assert told.exit_code == 2
    assert "has 1 finished cells: add --resume" in " ".join(told.output.split())
    told = run.invoke(table.main, [*words, "--resume", "--json", str(tmp_path / "out.json")])
    assert told.exit_code == 0
    assert told.output.count(" CPU s\n") == 1  # one cell was there
    out = json.loads((tmp_path / "out.json").read_text())
    assert len(out["rows"]) == 2


@pytest.mark.parametrize(
    ("option", "wrong"),
    [("--methods", "EWC"), ("--ratios", "half"), ("--ratios", "1.5"), ("--swaps", "none"), ("--memories", "0"),
     ("--storages", "0"), ("--storages", "all"), ("--memories", "")],
)  # fmt: skip
def test_lists_are_checked(option: str, wrong: str) -> None:
    told = CliRunner().invoke(table.main, [option, wrong])
    assert told.exit_code == 2
    said = " ".join(told.output.split())
    assert f"Invalid value for '{option}': " in said
    assert " is not " in said


@pytest.mark.long
def test_bench_run_resume_hands_a_kept_folder_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMHIER_DATA", str(data_folder()))
    if not (data_folder() / "omniglot-small1").is_dir():
        pytest.skip(f"Omniglot is not in {data_folder()}")
    words = ["--data", "omniglot", "--epochs", "1", "--width", "2", "--methods", "ER", "--memories", "20"]
    words += ["--ratios", "0", "--storages", "none", "--swaps", "random", "--seeds", "1", "--samples", "136"]
    parameters = {
        "module": "replay.paper.table",
        "arguments": words,
        "timeout_s": 600,
        "on_device": True,
        "keeps": True,
    }
    load = Workload("cells", "replay", "", "script", {}, {}, parameters, ())
    (tmp_path / "scratch").mkdir()

    def run(name: str, resume: bool) -> dict[str, Any]:
        results = Results(tmp_path / name)
        run_script(load, "quick", tmp_path / "scratch", tmp_path, results, resume)
        return results.rows()[-1]

    assert run("a", False)["kind"] == "script"
    refused = run("b", False)
    assert (refused["kind"], "--resume" in refused["why"]) == ("failed", True)
    again = run("c", True)
    assert again["kind"] == "script"
    assert str(tmp_path) not in again["command"]
    assert "CPU s" not in again["words"].partition("Accuracy")[0]  # nothing was run


def test_the_workloads_keep_their_cells() -> None:
    for path in (FOLDER / "replay").rglob("*.toml"):
        read = tomllib.loads(path.read_text())
        if not read["parameters"].get("keeps"):
            continue
        for size in ("quick", "full"):
            table.main.make_context("table", [*read[size]["arguments"]])


@pytest.mark.parametrize("shape", [(28, 28), (32, 32, 3), (64, 64, 3), (27, 27)])
@pytest.mark.parametrize("half", [False, True])
def test_networks_take_every_shape(shape: tuple[int, ...], half: bool) -> None:
    pixels = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    for name, make in MODELS.items():
        if name == "dense" and len(shape) > 2:
            continue
        model = make(shape, 7, 4, half)
        for prepare in (plain, shifted) if len(shape) == 2 else (plain, shifted, cropped):
            logits = model(prepare(pixels))
            assert (logits.shape, logits.dtype) == ((3, 7), torch.float32)
        assert model.features(plain(pixels)).shape == (3, model.head.in_features)
    whole = MODELS["resnet"]((32, 32, 3), 10, 64, False)
    assert sum(values.numel() for values in whole.parameters()) == 11_173_962  # ResNet-18 for CIFAR-10


def test_published_layouts_are_read(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    records = np.concatenate(
        [np.zeros((8, 1)), np.arange(8)[:, None] % 3, pixels.transpose(0, 3, 1, 2).reshape(8, -1)], 1
    )
    for name in ("train", "test"):
        records.astype(np.uint8).tofile(tmp_path / f"{name}.bin")
    read = STREAMS["cifar100"].load(tmp_path)
    assert (read.train == pixels).all()
    assert read.test_labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    (tmp_path / "test.bin").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"test\.bin.*3,074"):
        STREAMS["cifar100"].load(tmp_path)

    colours = {"n01": 10, "n02": 200}
    for name, value in colours.items():
        place = tmp_path / "train" / name / "images"
        place.mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (64, 64), (value, value, value)).save(place / f"{name}_{number}.JPEG")
    (tmp_path / "val" / "images").mkdir(parents=True)
    Image.new("L", (64, 64), 200).save(tmp_path / "val" / "images" / "val_0.JPEG")
    (tmp_path / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n")
    read = STREAMS["tiny-imagenet"].load(tmp_path)
    assert read.train.shape == (6, 64, 64, 3)
    assert read.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert (abs(read.test.astype(int) - 200) < 5).all()
    assert read.test_labels.tolist() == [1]


@pytest.mark.parametrize(("name", "classes"), [("omniglot", 136), ("permuted-mnist", 100)])
def test_streams_of_many_classes(name: str, classes: int) -> None:
    try:
        read = STREAMS[name].load(None)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    each = np.bincount(read.train_labels)
    assert (len(each), len(set(each.tolist()))) == (classes, 1)
    order = STREAMS[name].order(classes, 3)
    assert sorted(order.reshape(-1).tolist()) == [*range(classes)]
    assert (order // 10 == order[:, :1] // 10).all() == (name == "permuted-mnist")
    assert (STREAMS[name].order(classes, 3) == order).all()
    assert (STREAMS[name].order(classes, 4) != order).any()

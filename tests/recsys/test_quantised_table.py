"""QuantisedTable: rows of few bytes on SSD, against the weights that they stand for, and against torch's own form."""

import json
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from memhier.errors import BudgetError, ClosedError, FormatError
from memhier.recsys import SGD, EmbeddingBag, QuantisedTable, export_quantised, vector_blocks

torch.set_num_threads(1)
ROWS, DIM = 400, 5


def rows_of(seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return rows unlike those of a training: constant, tiny, huge, far from zero."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(ROWS, DIM)).astype("f4")
    rows[::7] = rng.normal(size=(len(rows[::7]), 1))
    rows[1::7] *= np.float32(1e-41)
    rows[2::7] = rows[2::7] * np.float32(1e-4) + np.float32(1000)
    rows[3::7] *= np.float32(1e4)
    rows[4::7, 0] = 0
    return rows


def write(path: Path, rows: Any, dtype: Any) -> None:
    with EmbeddingBag(ROWS, DIM, mode="sum", optimizer=SGD(), dram="32MiB", path=str(path) + ".bag") as bag:
        bag.tables.write(0, np.arange(ROWS), rows)
        export_quantised(bag, path, dtype=dtype)


def write_first_version(path: Path, rows: Any) -> None:
    """Write a file as the first version did: codes, steps and least weights each by themselves."""
    least, step = rows.min(axis=1), np.ptp(rows, axis=1) / np.float32(255)
    codes = np.rint((rows - least[:, None]) / np.where(step > 0, step, 1)[:, None]).clip(0, 255).astype("u1")
    header: dict[str, Any] = {"__metadata__": {"memhier": "quantised int8"}}
    end = 0
    for name, kind, part in (("weight", "U8", codes), ("scale", "F32", step), ("least", "F32", least)):
        header[name] = {"dtype": kind, "shape": [*part.shape], "data_offsets": [end, end + part.nbytes]}
        end += part.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + codes.tobytes() + step.tobytes() + least.tobytes())


def bound(rows: Any, dtype: str) -> Any:
    """Return the error that the documents allow, by row or weight."""
    magnitude = np.abs(rows).max(axis=1, keepdims=True).astype("f8")
    if dtype == "fp16":
        return np.maximum(np.abs(rows.astype("f8")) * 2.0**-11, 2.0**-25)
    return 0.501 / 255 * np.ptp(rows.astype("f8"), axis=1, keepdims=True) + 2.0**-22 * magnitude + 2.0**-126


@pytest.mark.parametrize("dtype", ["int8", "fp16", "first version"])
@pytest.mark.parametrize("seed", range(3))
def test_no_weight_is_off_by_more_than_was_said(tmp_path: Path, dtype: str, seed: int) -> None:
    rows, path = rows_of(seed), tmp_path / "table"
    if dtype == "first version":
        write_first_version(path, rows)
    else:
        write(path, rows, dtype)
    for dram in ("2MiB", "64MiB"):
        with QuantisedTable(path, dram=dram) as table:
            assert table.shape == (ROWS, DIM)
            found = table.rows(np.arange(ROWS)).numpy()
            assert (np.abs(found.astype("f8") - rows) <= bound(rows, dtype)).all()
            some = np.random.default_rng(seed).integers(0, ROWS, (6, 4))
            assert np.array_equal(table.rows(some).numpy(), found[some])
            ids = torch.from_numpy(some)
            expected = torch.nn.functional.embedding_bag(ids, torch.from_numpy(found), mode="mean")
            assert torch.equal(table.embedding_bag(mode="mean")(ids), expected)
            assert torch.equal(table.embedding()(ids), torch.from_numpy(found[some]))
            assert table.memory_bytes <= (2 if dram == "2MiB" else 64) * 2**20
            assert np.array_equal(np.concatenate([block for _, block in vector_blocks(table)]), found)
            assert table.stats()["hits"] > 0


def test_rows_of_int8_are_those_of_torch(tmp_path: Path) -> None:
    rows = rows_of(0)
    write(tmp_path / "table", rows, "int8")
    packed = load_file(tmp_path / "table")["weight"]
    assert packed.shape == (ROWS, DIM + 8)
    unpacked = torch.ops.quantized.embedding_bag_byte_unpack(packed)
    with QuantisedTable(tmp_path / "table") as table:
        difference = (table.rows(np.arange(ROWS)) - unpacked).abs()  # a product and a sum, rounded once or twice
    assert (difference.numpy() <= 2.0**-22 * np.abs(rows).max(axis=1, keepdims=True)).all()


@pytest.mark.parametrize("dtype", ["int8", "fp16"])
@pytest.mark.parametrize("weights", [[np.nan, 1], [np.inf, 1], [3e38, -3e38]])
def test_weights_that_do_not_fit_are_named(tmp_path: Path, dtype: Any, weights: list[float]) -> None:
    rows = rows_of(0)
    rows[37, :2] = weights
    if dtype == "fp16" and not np.isfinite(weights).all():
        write(tmp_path / "table", rows, dtype)  # half precision has these
        return
    with pytest.raises(ValueError, match=r"row(s\[| )37"):
        write(tmp_path / "table", rows, dtype)
    assert not (tmp_path / "table").exists()


def test_a_table_beyond_its_budget_reads_the_rows_that_it_lacks(tmp_path: Path) -> None:
    rows = rows_of(0)
    write(tmp_path / "table", rows, "int8")
    with pytest.raises(BudgetError, match="would be enough") as refused:
        QuantisedTable(tmp_path / "table", dram=1000, threads=2)
    enough = int(str(refused.value).rsplit("dram=", 1)[1].split()[0])
    with QuantisedTable(tmp_path / "table", dram=enough, threads=2) as table:
        assert table.stats()["capacity"] < ROWS
        expected = table.rows(np.arange(ROWS))
        wrong = []

        def look_up(seed: int) -> None:
            for turn in range(20):
                some = torch.from_numpy(np.random.default_rng(seed + turn).integers(0, ROWS, 90))
                if not torch.equal(table.rows(some), expected[some]):
                    wrong.append(some)

        threads = [threading.Thread(target=look_up, args=(100 * seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
    for call in (lambda: table.rows([1]), table.stats):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [ROWS, 8]}, {"shape": [0, 13]}, {"dtype": "F16"}, {"data_offsets": [0, 7]}, {"shape": [ROWS * 13]},
    ],
)  # fmt: skip
def test_headers_that_fit_no_table_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "table"
    write(path, rows_of(0), "int8")
    raw = path.read_bytes()
    length = struct.unpack_from("<Q", raw)[0]
    header = json.loads(raw[8 : 8 + length])
    header["weight"] |= change
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    with pytest.raises(FormatError, match="table"):
        QuantisedTable(path)

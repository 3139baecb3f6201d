"""TableReader: trained tables in other objects, threads and processes, against the weights of the trainer."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memhier.budget import parse_bytes
from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError
from memhier.policies import Belady
from memhier.recsys import (
    SGD,
    Adagrad,
    Adam,
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    TableReader,
    Uniform,
    vector_blocks,
)
from memhier.recsys.embedding.serving.row_cache import RowCache
from memhier.store.store import Store

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, DIM = 700, 6
RULES = {
    "adam": ({"optimizer": Adam(lr=0.1)}, 1),
    "fp16": ({"optimizer": SGD(lr=0.1), "codec": "fp16"}, 2),
    "int8ef": ({"optimizer": SGD(lr=0.1), "codec": "int8ef", "initial": Uniform()}, 3),
}


def small() -> dict[str, Any]:
    """Return options with room for few rows."""
    return {"dram": "64MiB", "policy": Belady(90)}


def train(bag: Any, rng: np.random.Generator, steps: int = 12, rows: int = ROWS) -> None:
    for _ in range(steps):
        bag(torch.from_numpy((rows * rng.random((16, 4)) ** 2).astype(np.int64))).square().sum().backward()


def every(tables: Any, table: int = 0) -> torch.Tensor:
    spec = tables.specs[table]
    found: torch.Tensor = (tables.rows if hasattr(tables, "rows") else tables.weights)(np.arange(spec.rows), table)
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dram", ["13MiB", "64MiB"])
def test_a_reader_has_the_rows_of_its_checkpoint(tmp_path: Path, rule: str, dram: str) -> None:
    options, seed = RULES[rule]
    rng = np.random.default_rng(seed)
    with EmbeddingBag(ROWS, DIM, path=tmp_path, **options, **small()) as bag:
        train(bag, rng, rows=40)
        first = bag.checkpoint({"step": 0})
        with TableReader(tmp_path, dram=dram) as reader, TableReader(tmp_path, dram=dram) as staying:
            assert reader.generation == first
            assert not reader.refresh()
            begun, before = every(staying), every(bag)
            lossless = rule == "adam"
            for round_ in range(1, 12):  # parts are joined and dropped meanwhile
                train(bag, rng)
                assert torch.equal(every(reader), before) or not lossless
                assert torch.equal(every(staying), begun)
                generation = bag.checkpoint({"step": round_})
                assert reader.refresh()
                assert (reader.generation, reader.extra) == (generation, {"step": round_})
                before = every(bag)
                torch.testing.assert_close(every(reader), before, rtol=0, atol=0 if lossless else 2e-3)
                some = rng.integers(0, ROWS, (3, 5))
                assert torch.equal(reader.rows(some), every(reader)[torch.from_numpy(some)])
            assert torch.equal(reader.rows(torch.tensor([], dtype=torch.int64)), torch.empty(0, DIM))
            assert reader.stats()["hits"] > 0
            assert reader.memory_bytes <= parse_bytes(dram)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, -3, 5])
def test_bags_have_the_bits_of_the_module(tmp_path: Path, mode: Any, padding: int | None) -> None:
    rng = np.random.default_rng(0)
    with EmbeddingBag(
        ROWS, DIM, mode=mode, padding_idx=padding, path=tmp_path, optimizer=Adam(lr=0.1), **small()
    ) as bag:
        train(bag, rng)
        bag.checkpoint()
        bag.eval()
        with TableReader(tmp_path, dram="16MiB") as reader:
            module = reader.embedding_bag(mode=mode, padding_idx=padding)
            model = nn.ModuleDict({"bag": module})
            model.load_state_dict({"bag." + name: value for name, value in bag.state_dict().items()})
            assert not [*model.parameters()]
            lengths = rng.integers(0, 9, 40)
            ids = torch.from_numpy(rng.integers(0, 9, lengths.sum()))
            offsets = torch.from_numpy(np.cumsum(lengths) - lengths)
            for room in (reader.call_rows, 9, 10, 23):
                reader.call_rows = room
                assert torch.equal(module(ids, offsets), bag(ids, offsets))
                matrix = torch.from_numpy(rng.integers(0, ROWS, (10, 8)))
                assert torch.equal(module(matrix), bag(matrix))
                assert torch.equal(module(matrix[:0]), bag(matrix[:0]))
                if mode == "sum":
                    weights = torch.from_numpy(rng.random(len(ids)).astype("f4"))
                    assert torch.equal(module(ids, offsets, weights), bag(ids, offsets, weights))
            last = reader.embedding_bag(mode=mode, padding_idx=padding, include_last_offset=True)
            ends = torch.cat([offsets, torch.tensor([len(ids)])])
            assert torch.equal(last(ids, ends), bag(ids, offsets))
            reader.call_rows = 5
            with pytest.raises(BudgetError, match="a bag of 8 ids"):
                module(matrix)


def test_a_collection_is_served_by_the_names_of_its_tables(tmp_path: Path) -> None:
    configs = [
        EmbeddingBagConfig(name="user", num_embeddings=50, embedding_dim=3),
        EmbeddingBagConfig(
            name="item", num_embeddings=400, embedding_dim=7, feature_names=["seen", "bought"], pooling="mean"
        ),
    ]
    rng = np.random.default_rng(0)
    batch = {
        name: torch.from_numpy(rng.integers(0, rows, (12, 3)))
        for name, rows in (("user", 50), ("seen", 400), ("bought", 400))
    }
    with EmbeddingBagCollection(configs, path=tmp_path, optimizer=Adagrad(lr=0.1), **small()) as tables:
        tables(batch).values().square().sum().backward()
        tables.checkpoint()
        tables.eval()
        with TableReader(tmp_path, dram="16MiB") as reader:
            for table in range(2):
                assert torch.equal(every(reader, table), every(tables, table))
            served, expected = reader.embedding_bag_collection(configs)(batch), tables(batch)
            assert list(served) == list(expected)
            assert torch.equal(served.values(), expected.values())
            part = reader.embedding_bag_collection(configs[1:])(batch)
            assert torch.equal(part["bought"], expected["bought"])
            for change, message in (({"name": "shop"}, "no 'shop'"), ({"num_embeddings": 51}, "has 51 rows")):
                fields: dict[str, Any] = {"name": "user", "num_embeddings": 50, "embedding_dim": 3, **change}
                with pytest.raises(ValueError, match=message):
                    reader.embedding_bag_collection([EmbeddingBagConfig(**fields)])


def test_look_ups_go_on_beside_refreshes_each_of_one_checkpoint(tmp_path: Path) -> None:
    rng, wrong = np.random.default_rng(0), []
    with EmbeddingBag(ROWS, DIM, path=tmp_path, optimizer=Adam(lr=0.1), **small()) as bag:
        train(bag, rng)
        bag.checkpoint()
        states = [every(bag)]
        done, begun = threading.Event(), threading.Event()
        with TableReader(tmp_path, dram="14MiB", threads=2) as reader:
            reader.call_rows = 50  # a call reads in several parts

            def look_up(seed: int) -> None:
                ids = np.random.default_rng(seed).permutation(ROWS)
                while not done.is_set():
                    known = [*states]  # a checkpoint's state is there before a refresh finds it
                    found = reader.rows(ids)
                    begun.set()
                    known += [state for state in states if not any(state is one for one in known)]
                    if not any(torch.equal(found, state[torch.from_numpy(ids)]) for state in known):
                        wrong.append(found)

            threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(2)]
            for thread in threads:
                thread.start()
            for _ in range(10):
                train(bag, rng, 4)
                states.append(every(bag))
                bag.checkpoint()
                begun.clear()
                assert reader.refresh()
                begun.wait(60)
            done.set()
            for thread in threads:
                thread.join()
    assert not wrong


def test_another_process_reads_beside_the_trainer(tmp_path: Path) -> None:
    with Embedding(ROWS, DIM, padding_idx=0, path=tmp_path, **small()) as items:
        train(items, np.random.default_rng(0))
        items.checkpoint()
        expected = float(items.weights(np.arange(ROWS)).double().sum())
        program = (
            "import sys, numpy as np; from memhier.recsys import TableReader\n"
            "with TableReader(sys.argv[1], dram='16MiB') as reader:\n"
            "    print(repr(float(reader.embedding()(np.arange(int(sys.argv[2]))).double().sum())))"
        )
        command = [sys.executable, "-c", program, str(tmp_path), str(ROWS)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=800, check=True)
        assert float(ended.stdout) == expected


def test_the_budget_holds_where_tables_grow(tmp_path: Path) -> None:
    with EmbeddingBag(10**7, 8, path=tmp_path, dram="96MiB", touched=10**6, mode="sum") as bag:
        bag(torch.arange(100)[:, None]).sum().backward()
        bag.checkpoint()
        with pytest.raises(BudgetError, match="would be enough") as refused:
            TableReader(tmp_path, dram="1MiB")
        enough = int(str(refused.value).rsplit("dram=", 1)[1].split()[0])
        TableReader(tmp_path, dram=enough).close()
        with TableReader(tmp_path, dram=enough + 16 * 2**20) as reader:
            capacity = reader.stats()["capacity"]
            for start in range(100, 60_000, 10_000):
                bag(torch.arange(start, start + 10_000)[:, None]).sum().backward()
            bag.checkpoint()
            ids = np.arange(0, 60_000, 7)
            before = reader.rows(ids)
            assert reader.refresh()
            assert reader.stats()["capacity"] < capacity
            assert torch.equal(reader.rows(ids), bag.weights(ids))
            assert reader.memory_bytes <= enough + 16 * 2**20
        with TableReader(tmp_path, dram=enough + 16 * 2**20) as reader:
            assert not torch.equal(reader.rows(ids), before)
            for start in range(60_100, 500_000, 10_000):
                bag(torch.arange(start, start + 10_000)[:, None]).sum().backward()
            bag.checkpoint()
            generation, known = reader.generation, reader.rows(ids)
            with pytest.raises(BudgetError, match="would be enough"):
                reader.refresh()
            assert reader.generation == generation
            assert torch.equal(reader.rows(ids), known)


def test_the_cache_holds_the_rows_in_use() -> None:
    cache = RowCache(40 * RowCache.row_bytes(2, "f4"), 2, "f4", 1000)
    assert cache.capacity == 40
    rng, asked = np.random.default_rng(0), 0

    def rows_of(numbers: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return np.stack([numbers, -numbers], 1).astype("f4")

    for size in (0, 1, 7, 40, 41, 300, 5):
        for _ in range(20):
            numbers = np.unique(np.concatenate([np.arange(5), rng.integers(-(2**62), 2**62, size)]))
            found = cache.rows(numbers, lambda missing, numbers=numbers: rows_of(numbers[missing]))
            assert np.array_equal(found, rows_of(numbers))
            asked += len(numbers)
    assert cache.hits + cache.misses == asked
    assert cache.hits >= 5 * 19  # those of every call


def test_folders_without_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TableReader(tmp_path / "none", dram="16MiB")
    with EmbeddingBag(10, 4, path=tmp_path / "new", dram="32MiB"), pytest.raises(FormatError, match="unfinished"):
        TableReader(tmp_path / "new", dram="16MiB")
    with Store.create(tmp_path / "other", kind="tiered") as store, store.begin() as tx:
        tx.put("x", b"")
        tx.commit()
    with pytest.raises(FormatError, match="without tables"):
        TableReader(tmp_path / "other", dram="16MiB")
    (tmp_path / "ranks" / "shard-0-of-2-since-0").mkdir(parents=True)
    with pytest.raises(FormatError, match="shards of tables over ranks"):
        TableReader(tmp_path / "ranks", dram="16MiB")


def test_larger_tables_made_anew_leave_a_reader_as_it_was(tmp_path: Path) -> None:
    def make(rows: int, dim: int) -> EmbeddingBag:
        return EmbeddingBag(rows, dim, path=tmp_path / "bag", dram="64MiB", mode="sum")

    def fill(bag: EmbeddingBag) -> None:
        rows, dim = bag.specs[0].rows, bag.specs[0].dim
        bag.tables.write(0, np.arange(rows), np.arange(rows * dim, dtype=np.float32).reshape(rows, dim))
        bag.checkpoint()

    with make(20_000, 4) as bag:
        fill(bag)
    with TableReader(tmp_path / "bag", dram="11MiB") as reader:
        capacity = reader.stats()["capacity"]
        (tmp_path / "bag").rename(tmp_path / "gone")
        with make(60_000, 16) as bag:
            fill(bag)
            bag.checkpoint()
        for _ in range(2):
            with pytest.raises(FormatError, match="other tables lie there now"):
                reader.refresh()
            assert reader.rows([7, 19_999]).tolist() == [[28, 29, 30, 31], [79996, 79997, 79998, 79999]]
        assert reader.stats()["capacity"] == capacity


def test_tables_made_anew_are_not_taken_for_the_old_ones(tmp_path: Path) -> None:
    place = tmp_path / "bag"
    with EmbeddingBag(50, 4, path=place, dram="32MiB") as bag:
        bag(torch.arange(50)[:, None]).sum().backward()
        bag.checkpoint()
    with TableReader(place, dram="16MiB") as reader:
        known = every(reader)
        place.rename(tmp_path / "gone")
        with EmbeddingBag(50, 4, path=place, dram="32MiB") as bag:
            bag(torch.arange(50)[:, None]).square().sum().backward()
            bag.checkpoint()
            with pytest.raises(FormatError, match="other tables lie there now"):
                reader.refresh()
        assert torch.equal(every(reader), known)


def test_a_damaged_page_is_told(tmp_path: Path) -> None:
    with EmbeddingBag(ROWS, 64, path=tmp_path, dram="32MiB") as bag:
        bag(torch.arange(ROWS)[:, None]).sum().backward()
        bag.checkpoint()
    largest = max((tmp_path / "segments").iterdir(), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
        os.fsync(file.fileno())
    with TableReader(tmp_path, dram="16MiB") as reader, pytest.raises(CorruptionError, match="is damaged"):
        every(reader)


def test_ids_out_of_range_and_closed_readers_are_refused(tmp_path: Path) -> None:
    with EmbeddingBag(10, 4, path=tmp_path, dram="32MiB") as bag:
        bag(torch.tensor([[3]])).sum().backward()
        bag.checkpoint()
    with TableReader(tmp_path, dram="16MiB") as reader:
        assert reader.trained([[3, 4]]).tolist() == [[True, False]]
        for ids in ([10], [-1]):
            with pytest.raises(IndexError, match="expected a row of table"):
                reader.rows(ids)
            with pytest.raises(IndexError):
                reader.bags(torch.tensor([ids]))
            with pytest.raises(IndexError):
                reader.trained(ids)
        with pytest.raises(ValueError, match="mode"):
            reader.bags(torch.tensor([[1]]), mode="min")  # type: ignore[arg-type]
    assert reader.memory_bytes == 0
    for call in (lambda: reader.rows([1]), reader.refresh, reader.stats, lambda: reader.trained([1])):
        with pytest.raises(ClosedError):
            call()


def test_blocks_of_vectors_are_the_rows(tmp_path: Path) -> None:
    with EmbeddingBag(ROWS, DIM, path=tmp_path, **small()) as bag:
        train(bag, np.random.default_rng(0), 1)
        bag.checkpoint()
        weights = every(bag).numpy()
        with TableReader(tmp_path, dram="16MiB") as reader:
            trained = np.flatnonzero(reader.trained(np.arange(ROWS)))
            assert 0 < len(trained) < ROWS
            for tables in (bag, reader):
                for ids in (None, trained, trained[:0]):
                    blocks = [*vector_blocks(tables, ids=ids, rows=101)]
                    expected = np.arange(ROWS) if ids is None else ids
                    assert np.array_equal(np.concatenate([some for some, _ in blocks] or [[]]), expected)
                    assert all(np.array_equal(rows, weights[some]) for some, rows in blocks)
                    assert all(len(some) <= 101 for some, _ in blocks)
            stays = vector_blocks(reader, rows=101)
            next(stays)
            train(bag, np.random.default_rng(1))
            bag.checkpoint()
            assert reader.refresh()
            assert all(np.array_equal(rows, weights[some]) for some, rows in stays)
        with pytest.raises(ValueError, match="rising"):
            vector_blocks(bag, ids=[2, 1])
        with pytest.raises(IndexError):
            vector_blocks(bag, ids=[ROWS])

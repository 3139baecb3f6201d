"""Exports of tables for any ids: each row with its id, and the row that unknown ids share."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from memhier.errors import FormatError
from memhier.recsys import (
    Adagrad,
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Hash64,
    QuantisedTable,
    TableReader,
    export_npy,
    export_parquet,
    export_quantised,
    export_safetensors,
    to_embedding_bag,
    vector_blocks,
)

torch.set_num_threads(1)

UNKNOWN = 2**61 + 1


@pytest.mark.parametrize("steps", [0, 30])
def test_every_export_has_each_id_with_its_row(tmp_path: Path, steps: int) -> None:
    configs = [
        EmbeddingBagConfig(name="known", num_embeddings=20, embedding_dim=3),
        EmbeddingBagConfig(
            name="any", num_embeddings=90, embedding_dim=5, id_space=Hash64(admit_after=2, expire_after=15)
        ),
    ]
    rng = np.random.default_rng(0)
    names = rng.integers(-(2**63), 2**63 - 1, 150)
    with EmbeddingBagCollection(configs, dram="64MiB", path=tmp_path / "tables", optimizer=Adagrad(lr=0.1)) as tables:
        for _ in range(steps):
            some = torch.from_numpy(names[(150 * rng.random((8, 3)) ** 2).astype(int)])
            tables({"known": torch.arange(8)[:, None], "any": some}).values().square().sum().backward()
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *tables.ids(1)])
        assert (len(ids) > 20) == (steps > 0)
        wanted = torch.cat([tables.weights(ids, 1), tables.weights([UNKNOWN], 1)])
        assert bool(wanted[-1].any()) == (steps > 0)  # it was trained by ids that were seen once

        export_npy(tables, tmp_path / "any.npy", 1)
        assert torch.equal(torch.from_numpy(np.load(tmp_path / "any.npy")), wanted)
        export_safetensors(tables, tmp_path / "all.safetensors")
        found = load_file(tmp_path / "all.safetensors")
        assert torch.equal(found["any"], wanted)
        assert torch.equal(found["any.ids"], ids)
        assert found["known"].shape == (20, 3)
        assert set(found) == {"known", "any", "any.ids"}
        export_parquet(tables, tmp_path / "any.parquet", 1)
        columns = pyarrow.parquet.read_table(tmp_path / "any.parquet").to_pydict()
        assert columns["id"] == [*ids.tolist(), None]
        assert torch.equal(torch.tensor(columns["embedding"]), wanted)
        blocks = [*vector_blocks(tables, 1, rows=7)]
        assert np.concatenate([np.empty(0, np.int64), *(some for some, _ in blocks)]).tolist() == ids.tolist()
        assert all(np.array_equal(rows, tables.weights(some, 1)) for some, rows in blocks)
        with pytest.raises(ValueError, match="any ids"):
            to_embedding_bag(tables, 1)
        tables.checkpoint()
        tables.eval()
        with TableReader(tmp_path / "tables", dram="16MiB") as reader:
            asked = {"known": torch.arange(8)[:, None], "any": torch.from_numpy(names[:24].reshape(8, 3))}
            served = reader.embedding_bag_collection(configs)(asked)
            assert torch.equal(served.values(), tables(asked).values())


@pytest.mark.parametrize("kind", [EmbeddingBag, Embedding])
@pytest.mark.parametrize("padding", [None, -1, 7])
def test_a_reader_and_a_quantised_file_find_rows_by_id(tmp_path: Path, kind: Any, padding: int | None) -> None:
    rng = np.random.default_rng(1)
    names = np.concatenate([[-1, 7, 2**63 - 1], rng.integers(-(2**63), 2**63 - 1, 200)])
    space = Hash64(admit_after=2, expire_after=12)
    options: dict[str, Any] = {"id_space": space, "padding_idx": padding, "dram": "64MiB", "optimizer": Adagrad(lr=0.1)}
    if kind is EmbeddingBag:
        options["mode"] = "sum"
    with kind(60, 5, path=tmp_path / "tables", **options) as table:

        def train(steps: int) -> None:
            for _ in range(steps):
                some = torch.from_numpy(names[(len(names) * rng.random((8, 3)) ** 2).astype(int)])
                table(some).square().sum().backward()

        table.checkpoint()
        with TableReader(tmp_path / "tables", dram="16MiB") as reader:
            assert torch.equal(reader.rows(names), table.weights(names))
            for steps in (1, 20, 20):
                train(steps)
                table.checkpoint()
                assert reader.refresh()
                assert reader.memory_bytes <= 2**24
                assert torch.equal(reader.rows(names), table.weights(names))
                own = table.contains(names).numpy()
                assert np.array_equal(reader.trained(names), own)
                assert torch.equal(reader.ids(), torch.cat([torch.empty(0, dtype=torch.int64), *table.ids()]))
                asked = torch.from_numpy(rng.choice(names, (9, 4)))
                table.eval()
                served: Any = reader.embedding()
                if kind is EmbeddingBag:
                    served = reader.embedding_bag(mode="sum", padding_idx=padding)
                assert torch.equal(served(asked), table(asked))
                table.train()
            blocks = [*vector_blocks(reader, rows=7)]
            assert np.array_equal(np.concatenate([ids for ids, _ in blocks]), reader.ids().numpy())
            assert all(np.array_equal(rows, table.weights(ids).numpy()) for ids, rows in blocks)
            if padding is not None:
                with pytest.raises(ValueError, match="trained with"):
                    reader.bags(asked, padding_idx=padding + 1)
        for dtype in ("int8", "fp16"):
            export_quantised(table, tmp_path / dtype, dtype=dtype)
            with QuantisedTable(tmp_path / dtype, dram="8MiB") as small:
                torch.testing.assert_close(small.rows(names), table.weights(names), rtol=0, atol=0.02)
                assert small.memory_bytes <= 2**23
                if padding is not None:
                    bags = small.bags(asked, mode="sum", padding_idx=padding)
                    if kind is EmbeddingBag:
                        table.eval()
                        torch.testing.assert_close(bags, table(asked), rtol=0, atol=0.1)


def test_a_resume_with_another_padding_says_so(tmp_path: Path) -> None:
    options: dict[str, Any] = {"id_space": "hash64", "dram": "64MiB", "path": tmp_path}
    with EmbeddingBag(60, 5, padding_idx=-3, **options) as table:
        table(torch.tensor([[-3, 2**40]])).sum().backward()
        table.checkpoint()
    with pytest.raises(FormatError, match="padding_idx=-3"):
        EmbeddingBag(60, 5, padding_idx=4, resume=True, **options)
    with EmbeddingBag(60, 5, padding_idx=-3, resume=True, **options) as table:
        assert table.contains([2**40]).item()

"""Exports of tables for any ids: each row with its id, and the row that unknown ids share."""

from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from memhier.errors import FormatError
from memhier.recsys import (
    Adagrad,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Hash64,
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
        tables.checkpoint()
        with pytest.raises(FormatError, match="any ids"):
            TableReader(tmp_path / "tables", dram="16MiB")
        with pytest.raises(ValueError, match="any ids"):
            export_quantised(tables, tmp_path / "served", 1)
        with pytest.raises(ValueError, match="any ids"):
            to_embedding_bag(tables, 1)

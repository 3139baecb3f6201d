"""EmbeddingBagCollection: every way to hand features in, against one torch.nn.EmbeddingBag for each table."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memhier.policies import Belady
from memhier.recsys import Adam, EmbeddingBagCollection, EmbeddingBagConfig, Normal

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

CONFIGS = [
    EmbeddingBagConfig(name="users", num_embeddings=30, embedding_dim=4, feature_names=["user"]),
    EmbeddingBagConfig(
        name="items", num_embeddings=500, embedding_dim=7, feature_names=["seen", "bought"], pooling="mean"
    ),
    EmbeddingBagConfig(name="shop", num_embeddings=3, embedding_dim=4, initial=Normal(std=0.1)),
]
FEATURES = [("user", 0), ("seen", 1), ("bought", 1), ("shop", 2)]


class Jagged:
    """The methods of a KeyedJaggedTensor that tables use."""

    def __init__(self, parts: dict[str, tuple[Tensor, Tensor]]) -> None:
        self._parts = parts

    def keys(self) -> list[str]:
        return list(self._parts)

    def values(self) -> Tensor:
        return torch.cat([ids for ids, _ in self._parts.values()])

    def offsets(self) -> Tensor:
        lengths = [torch.diff(torch.cat([offsets, torch.tensor([len(ids)])])) for ids, offsets in self._parts.values()]
        return torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])

    def weights_or_none(self) -> None:
        return None


def step(seed: int, samples: int = 6) -> dict[str, tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(seed)
    made = {}
    for name, table in FEATURES:
        lengths = rng.integers(0, 4, samples)
        ids = rng.integers(0, CONFIGS[table].num_embeddings, lengths.sum())
        made[name] = (torch.from_numpy(ids), torch.from_numpy(np.cumsum(lengths) - lengths))
    return made


@pytest.mark.parametrize("shape", ["jagged", "dict"])
@pytest.mark.parametrize("slots", [600, 70])
def test_tables_have_the_bits_of_torch(tmp_path: Path, shape: str, slots: int) -> None:
    with EmbeddingBagCollection(
        CONFIGS, optimizer=Adam(lr=0.01), dram="64MiB", path=tmp_path, policy=Belady(slots)
    ) as mine:
        theirs = [
            nn.EmbeddingBag(
                config.num_embeddings, config.embedding_dim, mode=config.pooling, sparse=True,
                _weight=mine.initial_weights(np.arange(config.num_embeddings), number),
            )
            for number, config in enumerate(CONFIGS)
        ]  # fmt: skip
        optimizer = torch.optim.SparseAdam([bag.weight for bag in theirs], lr=0.01)
        for seed in range(12):
            parts = step(seed)
            pooled = mine(Jagged(dict(reversed(parts.items()))) if shape == "jagged" else parts)
            assert list(pooled) == [name for name, _ in FEATURES]
            assert pooled.values().shape == (6, 4 + 7 + 7 + 4)
            expected = {}
            # The features of a table in one look-up: sums over repeats go through both.
            for number, bag in enumerate(theirs):
                names = [name for name, table in FEATURES if table == number]
                ids = torch.cat([parts[name][0] for name in names])
                ends = np.cumsum([0, *(len(parts[name][0]) for name in names)])
                offsets = torch.cat([parts[name][1] + int(end) for name, end in zip(names, ends, strict=False)])
                expected |= dict(zip(names, bag(ids, offsets).chunk(len(names)), strict=True))
            for name, _ in FEATURES:
                assert torch.equal(pooled[name], expected[name])
            scale = torch.linspace(-1, 1, 6)[:, None]
            optimizer.zero_grad()
            torch.stack([(value.square() * scale).sum() for value in expected.values()]).sum().backward()
            torch.stack([(value.square() * scale).sum() for value in pooled.to_dict().values()]).sum().backward()
            optimizer.step()
        for number, bag in enumerate(theirs):
            assert torch.equal(mine.weights(np.arange(bag.num_embeddings), number), bag.weight)


def test_one_id_a_feature_comes_as_a_matrix(tmp_path: Path) -> None:
    with EmbeddingBagCollection(CONFIGS, dram="64MiB", path=tmp_path) as mine:
        ids = torch.tensor([[1, 2, 3, 0], [4, 2, 2, 1]], dtype=torch.int32)
        pooled = mine(ids)
        assert torch.equal(pooled["bought"], mine.weights([3, 2], 1))
        named = {name: column[:, None] for (name, _), column in zip(FEATURES, ids.t(), strict=True)}
        assert torch.equal(pooled.values(), mine(named).values())


def test_weights_of_samples_are_taken(tmp_path: Path) -> None:
    with EmbeddingBagCollection(CONFIGS[:1], dram="64MiB", path=tmp_path) as mine:
        weights = torch.tensor([2.0, -1.0], requires_grad=True)
        pooled = mine({"user": (torch.tensor([1, 2]), torch.tensor([0]), weights)})
        rows = mine.weights([1, 2])
        assert torch.equal(pooled["user"][0], 2 * rows[0] - rows[1])
        pooled.values().sum().backward()
        assert weights.grad is not None
        assert torch.allclose(weights.grad, rows.sum(1))


@pytest.mark.parametrize(
    ("features", "kind", "words"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), ValueError, r"\[samples, 4\]"),
        ({"user": torch.zeros(1, 1, dtype=torch.int64)}, ValueError, "no 'seen'"),
        (3, TypeError, "KeyedJaggedTensor"),
        (
            {name: torch.zeros(1 + at, 1, dtype=torch.int64) for at, (name, _) in enumerate(FEATURES)},
            ValueError,
            "as many",
        ),
        ({name: torch.full((1, 1), 400) for name, _ in FEATURES}, IndexError, "table 'users', 0 to 29"),
    ],
)
def test_unfit_features_are_refused(tmp_path: Path, features: Any, kind: Any, words: str) -> None:
    with EmbeddingBagCollection(CONFIGS, dram="64MiB", path=tmp_path) as mine, pytest.raises(kind, match=words):
        mine(features)


def test_configurations_are_checked(tmp_path: Path) -> None:
    one = CONFIGS[0]
    for tables, words in (([], "at least one"), ([one, one], "'users'"), ([SimpleNamespace(pooling="max")], "pooling")):
        with pytest.raises(ValueError, match=words):
            EmbeddingBagCollection(tables, dram="64MiB", path=tmp_path)
    theirs = SimpleNamespace(
        name="t", num_embeddings=5, embedding_dim=2, feature_names=["f"], pooling=SimpleNamespace(value="SUM")
    )
    with EmbeddingBagCollection([theirs], dram="64MiB", path=tmp_path) as mine:
        assert mine(torch.tensor([[1]])).to_dict().keys() == {"f"}


@pytest.mark.parametrize("samples", [0, 1, 3, 97])
@pytest.mark.parametrize("place", ["first", "last", "turned"])
def test_gradients_that_are_part_of_others(tmp_path: Path, place: str, samples: int) -> None:
    """Rows of a gradient may lie apart, as behind torch.cat, or even side by side."""
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=dim) for name, dim in (("a", 3), ("b", 5))
    ]
    beside = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 20, (samples, 2)))
    tables = []
    for way in ("copied", place):
        with EmbeddingBagCollection(configs, dram="64MiB", path=tmp_path / way) as mine:
            pooled = mine(ids).values()
            if way == "copied":
                pooled.register_hook(lambda gradient: gradient.contiguous().clone())
            some = pooled.t().contiguous().t() if place == "turned" else pooled
            parts = [beside, some] if place == "last" else [some, beside]
            torch.cat(parts, 1).sin().square().sum().backward()
            tables.append([mine.weights(np.arange(20), table) for table in range(2)])
    assert torch.equal(tables[0][0], tables[1][0])
    assert torch.equal(tables[0][1], tables[1][1])


def test_keys_of_all_tables_are_told_apart(tmp_path: Path) -> None:
    """Rows that wrap round would share a key with those of another table."""
    configs = [EmbeddingBagConfig(name=str(at), num_embeddings=2**62, embedding_dim=1) for at in range(5)]
    with pytest.raises(ValueError, match="rows in all"):
        EmbeddingBagCollection(configs, dram="64MiB", path=tmp_path, touched=100)

"""TorchRec's configurations and tensors, against TorchRec's own modules on the same weights."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memhier.recsys import (
    SGD,
    Adagrad,
    EmbeddingBagCollection,
    EmbeddingCollection,
    TableReader,
    Uniform,
    lookahead,
)

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS = {"user": 40, "item": 300}


@pytest.fixture
def torchrec(plugin: Callable[[str, str], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FBGEMM for a CPU looks for operators of a GPU
        return plugin("torchrec", "torchrec")


def batch_of(torchrec: Any, seed: int, *, weighted: bool = False, samples: int = 6) -> Any:
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(rng.integers(0, 5, 4 * samples))
    total = int(lengths.sum())
    weights = torch.from_numpy(rng.random(total).astype("f4")) if weighted else None
    keys = ["clicked", "other", "user", "shown"]  # not in the order of tables, and one that no table has
    return torchrec.KeyedJaggedTensor(keys, torch.from_numpy(rng.integers(0, 40, total)), weights, lengths=lengths)


def configs_of(torchrec: Any, *, pooled: bool, dims: tuple[int, int] = (8, 4), **options: Any) -> list[Any]:
    kind = torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig
    made = [
        kind(name="user", num_embeddings=ROWS["user"], embedding_dim=dims[0], feature_names=["user"]),
        kind(name="item", num_embeddings=ROWS["item"], embedding_dim=dims[1], feature_names=["clicked", "shown"]),
    ]
    for config in made:
        for name, value in options.items():
            setattr(config, name, value)
    return made


def copy_weights(mine: Any, theirs: Any) -> None:
    with torch.no_grad():
        for number, weight in enumerate(theirs.parameters()):
            weight.copy_(mine.initial_weights(np.arange(len(weight)), number))


def assert_alike(mine: Any, theirs: Any) -> None:
    for number, weight in enumerate(theirs.parameters()):
        # TorchRec looks up the features of a table one by one, so sums over repeats may have other last bits.
        torch.testing.assert_close(mine.weights(np.arange(len(weight)), number), weight.detach())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_bags_go_in_and_come_out_as_in_torchrec(torchrec: Any, tmp_path: Path, weighted: bool, ahead: bool) -> None:
    configs = configs_of(torchrec, pooled=True)
    theirs = torchrec.EmbeddingBagCollection(tables=configs, is_weighted=weighted)
    with EmbeddingBagCollection(
        configs, is_weighted=weighted, optimizer=SGD(lr=0.1), dram="32MiB", path=tmp_path
    ) as mine:
        copy_weights(mine, theirs)
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
        batches = [batch_of(torchrec, seed, weighted=True) for seed in range(5)]
        for batch in lookahead(batches, mine, ids=lambda batch: batch) if ahead else batches:
            pooled, expected = mine(batch), theirs(batch)
            assert type(pooled) is type(expected)
            assert pooled.keys() == expected.keys()
            assert pooled.length_per_key() == expected.length_per_key()
            torch.testing.assert_close(pooled.values(), expected.values())
            groups = torchrec.KeyedTensor.regroup([pooled], [["shown", "user"], ["clicked"]])
            torch.testing.assert_close(groups[0], torch.cat([expected["shown"], expected["user"]], 1))
            (pooled["user"][:, :4] * (pooled["clicked"] + pooled["shown"])).sum().backward()
            optimizer.zero_grad()
            (expected["user"][:, :4] * (expected["clicked"] + expected["shown"])).sum().backward()
            optimizer.step()
        assert_alike(mine, theirs)
        mine.checkpoint()
        with TableReader(tmp_path, dram="16MiB") as reader, torch.no_grad():
            served = reader.embedding_bag_collection(configs)(batches[0])
            assert type(served) is torchrec.KeyedTensor
            if not weighted:
                plain = batch_of(torchrec, 0)
                served = reader.embedding_bag_collection(configs)(plain)
                assert torch.equal(served.values(), mine.eval()(plain).values())


def test_sequences_go_in_and_come_out_as_in_torchrec(torchrec: Any, tmp_path: Path) -> None:
    configs = configs_of(torchrec, pooled=False, dims=(4, 4))
    theirs = torchrec.EmbeddingCollection(tables=configs)
    with EmbeddingCollection(configs, optimizer=Adagrad(lr=0.1), dram="32MiB", path=tmp_path) as mine:
        copy_weights(mine, theirs)
        optimizer = torch.optim.Adagrad(theirs.parameters(), lr=0.1)
        for seed in range(5):
            batch = batch_of(torchrec, seed, weighted=seed == 3)
            found, expected = mine(batch), theirs(batch)
            assert {*found} == {*expected}
            for name, each in expected.items():
                assert type(found[name]) is type(each)
                torch.testing.assert_close(found[name].values(), each.values())
                assert torch.equal(found[name].lengths(), each.lengths())
                torch.testing.assert_close(found[name].to_padded_dense(3), each.to_padded_dense(3))
            for rows in (found, expected):
                optimizer.zero_grad()
                sum(rows[name].values().sin().sum() for name in ("user", "clicked", "shown")).backward()
            optimizer.step()
        assert_alike(mine, theirs)
        mine.checkpoint()
        with TableReader(tmp_path, dram="16MiB") as reader:
            served = reader.embedding_collection(configs)(batch_of(torchrec, 0))
            assert type(served["user"]) is torchrec.JaggedTensor


def test_weights_of_samples_have_gradients(torchrec: Any, tmp_path: Path) -> None:
    configs, batch = configs_of(torchrec, pooled=True), batch_of(torchrec, 1, weighted=True)
    theirs = torchrec.EmbeddingBagCollection(tables=configs, is_weighted=True)
    with EmbeddingBagCollection(configs, is_weighted=True, dram="32MiB", path=tmp_path) as mine:
        copy_weights(mine, theirs)
        gradients = []
        for tables in (theirs, mine):
            weights = batch.weights().clone().requires_grad_()
            part = torchrec.KeyedJaggedTensor(batch.keys(), batch.values(), weights, lengths=batch.lengths())
            tables(part).values().square().sum().backward()
            gradients.append(weights.grad)
        torch.testing.assert_close(gradients[1], gradients[0])
        with pytest.raises(ValueError, match="no weights of 'user'"):
            mine(batch_of(torchrec, 1))


def test_first_values_are_those_that_a_configuration_asks_for(torchrec: Any, tmp_path: Path) -> None:
    kind = torchrec.EmbeddingBagConfig
    plain = {"name": "user", "num_embeddings": 40, "embedding_dim": 4, "feature_names": ["user"]}
    for number, (options, initial) in enumerate(
        [({}, Uniform()), ({"weight_init_min": -0.5, "weight_init_max": 0.25}, Uniform(-0.5, 0.25))]
    ):
        with EmbeddingBagCollection([kind(**plain, **options)], dram="32MiB", path=tmp_path / str(number)) as mine:
            assert mine.specs[0].initial == initial
    for options, message in (
        ({"data_type": torchrec.modules.embedding_configs.DataType.FP16}, "float32"),
        ({"init_fn": torch.nn.init.zeros_}, "init_fn"),
    ):
        with pytest.raises(ValueError, match=message):
            EmbeddingBagCollection([kind(**plain, **options)], dram="32MiB", path=tmp_path / "refused")
    with pytest.raises(TypeError, match="without pooling"):
        EmbeddingCollection([kind(**plain)], dram="32MiB", path=tmp_path / "refused")
    with pytest.raises(TypeError, match="an EmbeddingBagConfig"):
        EmbeddingBagCollection([torchrec.EmbeddingConfig(**plain)], dram="32MiB", path=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_batches_of_different_sizes_are_refused(torchrec: Any, tmp_path: Path) -> None:
    configs = configs_of(torchrec, pooled=True)
    batch = torchrec.KeyedJaggedTensor(
        ["user", "clicked", "shown"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 1, 1]),
        stride_per_key_per_rank=[[2], [1], [1]],
    )  # fmt: skip
    with (
        EmbeddingBagCollection(configs, dram="32MiB", path=tmp_path) as mine,
        pytest.raises(ValueError, match="batch size of its own"),
    ):
        mine(batch)

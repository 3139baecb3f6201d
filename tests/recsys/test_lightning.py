"""Lightning's checkpoints beside those of tables and buffers, with the real library (``make test-plugins``)."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memhier.recsys import Adagrad, CarouselBuffer, EmbeddingBagCollection, EmbeddingBagConfig

pytestmark = pytest.mark.filterwarnings("ignore")
torch.set_num_threads(1)


@pytest.fixture
def lightning(plugin: Callable[[str, str], Any], torchvision: None) -> Any:
    return plugin("lightning.pytorch", "lightning")


def tables(folder: Path) -> EmbeddingBagCollection:
    config = [EmbeddingBagConfig(name=name, num_embeddings=200, embedding_dim=4, feature_names=[name]) for name in "ab"]
    place = folder / "tables"
    folder.mkdir(exist_ok=True)
    return EmbeddingBagCollection(config, optimizer=Adagrad(lr=0.1), dram="16MiB", path=place, resume=place.exists())


def module(lightning: Any, store: EmbeddingBagCollection) -> Any:
    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tables = store
            self.top = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            ids, target = batch
            pooled = self.tables({name: ids[:, column] for column, name in enumerate("ab")})
            return (self.top(pooled.values()).squeeze(1) - target).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.top.parameters(), lr=0.05)

    return Model()


def loader() -> Any:
    random = np.random.default_rng(0)
    data = torch.utils.data.TensorDataset(
        torch.from_numpy(random.integers(0, 200, (48, 2, 3))), torch.from_numpy(random.normal(size=48)).float()
    )
    return torch.utils.data.DataLoader(data, batch_size=8)


def train(lightning: Any, folder: Path, prepare: Callable[[Any, Any], None] = lambda *_: None) -> list[float]:
    """Train for three epochs of six steps, with two files at the end of each; return rows and weights."""
    from memhier.recsys.lightning import MemhierCheckpointIO

    with tables(folder) as store:
        checkpoints = MemhierCheckpointIO(store)
        prepare(checkpoints, store)
        each = lightning.callbacks.ModelCheckpoint(folder / "files", save_last=True)
        trainer = lightning.Trainer(
            plugins=[checkpoints], callbacks=[each], max_epochs=3, accelerator="cpu", logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        model = module(lightning, store)
        trainer.fit(model, loader(), ckpt_path=checkpoints.latest())
        assert trainer.global_step == 18
        parts = [store.weights(np.arange(200), table) for table in (0, 1)]
        parts += [store.optimizer_state(np.arange(200), 0), model.top.weight]
        return [value for part in parts for value in part.detach().flatten().tolist()]


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["before the file", "before the commit", "after the commit", "after the name"])
@pytest.mark.parametrize("count", [2, 5])
def test_a_killed_training_goes_on_as_if_undisturbed(lightning: Any, tmp_path: Path, moment: str, count: int) -> None:
    undisturbed = train(lightning, tmp_path / "a")
    left = [count]

    def prepare(checkpoints: Any, store: Any) -> None:
        import memhier.recsys.lightning as room

        def at_the_count(inner: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                left[0] -= 1
                if not left[0] and not after:
                    kill()
                found = inner(*arguments, **options)
                if not left[0]:
                    kill()
                return found

            return call

        if "commit" in moment:
            store.checkpoint = at_the_count(store.checkpoint, after="after" in moment)
        elif "file" in moment:
            checkpoints.save_checkpoint = at_the_count(checkpoints.save_checkpoint, after=False)
        else:
            room.os.replace = at_the_count(room.os.replace, after=True)

    child = os.fork()
    if child == 0:
        try:
            train(lightning, tmp_path / "b", prepare)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert train(lightning, tmp_path / "b") == undisturbed


def test_an_older_file_is_refused(lightning: Any, tmp_path: Path) -> None:
    from memhier.recsys.lightning import MemhierCheckpointIO

    train(lightning, tmp_path)
    with tables(tmp_path) as store:
        checkpoints = MemhierCheckpointIO(store)
        newest = checkpoints.latest()
        assert newest is not None
        assert set(checkpoints.load_checkpoint(newest)["state_dict"]) >= {"top.weight", "top.bias"}
        [older] = set(map(str, (tmp_path / "files").iterdir())) - {newest}
        with pytest.raises(ValueError, match="of checkpoint 5, expected 6"):
            checkpoints.load_checkpoint(older)
        assert not list((tmp_path / "files").glob("*.new"))


def test_a_buffer_goes_back_to_the_file(lightning: Any, tmp_path: Path) -> None:
    from memhier.recsys.lightning import MemhierCheckpointIO

    schema = {"x": ("float32", 2)}
    with CarouselBuffer(tmp_path / "b", memory=10, schema=schema, seed=0) as buffer:
        checkpoints = MemhierCheckpointIO(buffer)
        assert checkpoints.latest() is None
        for number in range(3):
            buffer.add({"x": np.full((20, 2), number, np.float32)})
            checkpoints.save_checkpoint({"epoch": number, "state_dict": {}}, tmp_path / f"{number % 2}.ckpt")
        wanted = buffer.sample(8)["x"].copy()
        buffer.add({"x": np.ones((5, 2), np.float32)})
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        checkpoints = MemhierCheckpointIO(buffer)
        newest = checkpoints.latest()
        assert newest == str(tmp_path / "0.ckpt")
        assert checkpoints.load_checkpoint(newest)["epoch"] == 2
        assert buffer.stats()["storage_samples"] == 60
        np.testing.assert_array_equal(buffer.sample(8)["x"], wanted)
        with pytest.raises(ValueError, match="a model of checkpoint 2, expected 3"):
            checkpoints.load_checkpoint(tmp_path / "1.ckpt")

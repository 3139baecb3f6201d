"""Lightning's checkpoints beside those of tables and buffers, with the real library (``make test-plugins``)."""

import os
import signal
import subprocess
import sys
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


def fit(lightning: Any, folder: Path, store: Any, epochs: int, each: Any, fails_at: BaseException | None = None) -> Any:
    """Train from the newest checkpoint, up to an error in the ninth step; return the trainer and its plugin."""
    from memhier.recsys.lightning import MemhierCheckpointIO

    checkpoints, model = MemhierCheckpointIO(store), module(lightning, store)
    inner, steps = model.training_step, [0]

    def step(batch: Any, batch_idx: int) -> torch.Tensor:
        steps[0] += 1
        loss: torch.Tensor = inner(batch, batch_idx)
        if fails_at is not None and steps[0] == 9:
            raise fails_at
        return loss

    model.training_step = step
    trainer = lightning.Trainer(
        plugins=[checkpoints], callbacks=[each], max_epochs=epochs, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader(), ckpt_path=checkpoints.latest())
    return trainer, checkpoints


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


def test_files_beyond_the_best_go_and_the_newest_stays(lightning: Any, tmp_path: Path) -> None:
    each = lightning.callbacks.ModelCheckpoint(
        tmp_path / "files", monitor="epoch", mode="max", save_top_k=2, filename="{epoch}"
    )
    with tables(tmp_path) as store:
        trainer, checkpoints = fit(lightning, tmp_path, store, 5, each)
        assert {file.name for file in (tmp_path / "files").iterdir()} == {"epoch=3.ckpt", "epoch=4.ckpt"}
        newest = checkpoints.latest()
        assert newest == str(tmp_path / "files" / "epoch=4.ckpt")
    with tables(tmp_path) as store:
        trainer, _ = fit(lightning, tmp_path, store, 6, each)
        assert trainer.global_step == 36


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_checkpoint_at_an_exception_goes_on(lightning: Any, tmp_path: Path, kind: type[BaseException]) -> None:
    each = lightning.callbacks.ModelCheckpoint(tmp_path / "files", save_on_exception=True)
    with tables(tmp_path) as store, pytest.raises((RuntimeError, SystemExit)):
        fit(lightning, tmp_path, store, 3, each, kind("in a step"))
    with tables(tmp_path) as store:
        assert store.steps == 8
        again = lightning.callbacks.ModelCheckpoint(tmp_path / "files")
        trainer, _ = fit(lightning, tmp_path, store, 3, again)
        assert (trainer.global_step, store.steps) == (18, 18)


def test_a_save_that_fails_leaves_the_checkpoint_before(
    lightning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import memhier.recsys.lightning as room

    with tables(tmp_path) as store:
        trainer, checkpoints = fit(
            lightning, tmp_path, store, 1, lightning.callbacks.ModelCheckpoint(tmp_path / "files")
        )
        newest = checkpoints.latest()

        def fail(path: Path) -> None:
            raise OSError(28, "No space left on device", str(path))

        with monkeypatch.context() as patch:
            patch.setattr(room, "_sync", fail)
            with pytest.raises(OSError, match="No space left"):
                trainer.save_checkpoint(tmp_path / "more.ckpt")
        assert not list(tmp_path.glob("more*"))
        assert checkpoints.latest() == newest
        assert checkpoints.load_checkpoint(newest)["global_step"] == 6
        trainer.save_checkpoint(tmp_path / "more.ckpt")
        assert checkpoints.latest() == str(tmp_path / "more.ckpt")


def test_one_store_is_taken(lightning: Any, tmp_path: Path) -> None:
    from memhier.recsys.lightning import MemhierCheckpointIO

    with tables(tmp_path) as store:
        for several in ([store], torch.nn.ModuleList([store]), None):
            with pytest.raises(TypeError, match="several tables belong into one EmbeddingBagCollection"):
                MemhierCheckpointIO(several)  # type: ignore[arg-type]


RANKS = """
import sys, torch, lightning.pytorch as lightning
from memhier.recsys import CarouselBuffer
from memhier.recsys.lightning import MemhierCheckpointIO
import os
rank = os.environ.get("LOCAL_RANK", "0")
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.top = torch.nn.Linear(2, 1)
    def training_step(self, batch, _):
        return self.top(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
with CarouselBuffer(f"{sys.argv[1]}/buffer{rank}", memory=4, schema={"x": ("float32", 2)}, seed=0) as buffer:
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=lightning.strategies.DDPStrategy(process_group_backend="gloo"),
        plugins=[MemhierCheckpointIO(buffer)], max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=sys.argv[1],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))
"""


def test_several_ranks_are_refused_before_anything_is_written(lightning: Any, tmp_path: Path) -> None:
    """Lightning saves on rank 0 alone: the buffers of other ranks would stay behind."""
    code = (
        "import torch, sys, runpy\n"
        "library = torch.library.Library('torchvision', 'DEF')\n"
        "for name in ('nms(Tensor a, Tensor b, float c) -> Tensor', 'qnms(Tensor a, Tensor b, float c) -> Tensor'):\n"
        "    try: library.define(name)\n"
        "    except RuntimeError: pass\n"
    )
    (tmp_path / "train.py").write_text(code + RANKS)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path)]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
    assert done.returncode
    assert "MemhierCheckpointIO: 2 ranks, expected 1" in done.stderr
    assert not list(tmp_path.rglob("*.ckpt*"))

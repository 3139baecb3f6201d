"""Steps and streams of ER, DER++ and iCaRL beside those of Avalanche (``make test-plugins``) and of Mammoth.

Mammoth is not on PyPI: MEMHIER_MAMMOTH names a checkout of it (github.com/aimagelab/mammoth). Its models, buffer and
herding run as they are; stand-ins take the place of its data sets, command line and augmentation. Its own trainer runs
whole, in a process of its own.
"""

import copy
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memhier.benchmarks.datasets import data_folder, data_set_folder
from memhier.recsys.replay import CarouselBuffer, Field, RandomSwap
from memhier.recsys.replay.adapters.mammoth import MammothBuffer
from memhier.recsys.replay.methods import METHODS
from memhier.recsys.replay.methods.learner import blocks

pytestmark = pytest.mark.filterwarnings("ignore")

CLASSES, RATE = 6, 0.1
ALPHA, BETA = 0.2, 0.5
STAND_INS = (
    "datasets", "models.utils.continual_model", "utils", "utils.args", "utils.augmentations", "utils.batch_norm",
    "utils.buffer", "utils.conf", "torchvision", "torchvision.transforms",
)  # fmt: skip


class Net(nn.Module):
    """Without normalisation over a batch: its outputs do not depend on the way that samples are batched."""

    def __init__(self) -> None:
        super().__init__()
        self.feature_extractor = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.ReLU())
        self.train_classifier = nn.Linear(32, CLASSES)

    def features(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.feature_extractor(inputs)
        return found

    def forward(self, inputs: Tensor, returnt: str = "out") -> Tensor:
        features = self.features(inputs)
        return features if returnt == "features" else self.train_classifier(features)


def prepare(images: Tensor) -> Tensor:
    return images.float().div(128).sub(1)[:, None]


def blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    centres = np.random.default_rng(0).uniform(60, 190, (CLASSES, 6, 6))
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % CLASSES)
    images = np.clip(centres[labels] + random.normal(0, 60, (count, 6, 6)), 0, 255)
    return torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(labels)


class Step:
    """A step of one of our methods after two tasks: the model before it, the batches, and the model after it."""

    def __init__(self, place: Path, name: str, rate: float = RATE) -> None:
        images, labels = blobs(300, seed=1)
        kind: Any = METHODS[name]
        with CarouselBuffer(
            place, memory=36, schema=kind.schema((6, 6), CLASSES), admit=kind.admit, swap=None, seed=1
        ) as buffer:
            learner = kind(Net, buffer, prepare, classes=CLASSES, rate=RATE, batch=12, epochs=2, seed=1)
            for first in (0, 2):
                some = (labels == first) | (labels == first + 1)
                learner.learn_task(images[some], labels[some])
            # As in the middle of the last task: then all outputs are of classes seen.
            learner.seen, learner.old = [*range(CLASSES)], [0, 1, 2, 3]
            learner.optimizer.param_groups[0]["lr"] = rate
            self.before, self.old = copy.deepcopy(learner.model), getattr(learner, "before", None)
            self.images, self.labels = (values[labels > 3][:12] for values in (images, labels))
            drawn = buffer.sample(12)
            self.memory = (prepare(torch.from_numpy(drawn["image"])), torch.from_numpy(drawn.labels))
            if kind.stores_logits:
                self.logits = torch.from_numpy(drawn["logits"])
            with mock.patch.object(CarouselBuffer, "sample", return_value=drawn):
                learner.step(self.images, self.labels, keeps=False)
            self.after = learner.model
        self.stream = (prepare(self.images), self.labels)

    def check(self, model: nn.Module) -> None:
        """Compare another library's model after the same step with ours."""
        wanted, found = self.after.state_dict(), model.state_dict()
        moved = [(value - self.before.state_dict()[name]).abs().max() for name, value in wanted.items()]
        assert min(moved) > 1e-4
        for name, value in wanted.items():
            there = found[name if name in found else name.removeprefix("feature_")]
            torch.testing.assert_close(there, value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ER", "DER++", "iCaRL"])
def test_a_step_is_avalanches(tmp_path: Path, avalanche: Any, name: str) -> None:
    supervised = importlib.import_module("avalanche.training.supervised")
    # Avalanche's loss of iCaRL is a mean over outputs, ours and the paper's a sum.
    step = Step(tmp_path / "b", name, rate=RATE / CLASSES if name == "iCaRL" else RATE)
    model = copy.deepcopy(step.before)
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=RATE), "evaluator": None, "train_mb_size": 12}
    tasks = torch.zeros(12, dtype=torch.int64)
    together = [torch.cat([new, old]) for new, old in zip(step.stream, step.memory, strict=True)]
    batch = [*together, torch.cat([tasks, tasks])]
    if name == "DER++":
        strategy = supervised.DER(model=model, mem_size=36, batch_size_mem=12, alpha=ALPHA, beta=BETA, **options)
        strategy.replay_loader = iter([(*step.memory, tasks, step.logits)])
        batch = [*step.stream, tasks]
    elif name == "iCaRL":
        strategy = supervised.ICaRL(
            feature_extractor=model.feature_extractor, classifier=model.train_classifier, memory_size=36,
            buffer_transform=None, fixed_memory=True, **options,
        )  # fmt: skip
        criterion = next(plugin for plugin in strategy.plugins if hasattr(plugin, "old_classes"))
        criterion.old_model, criterion.old_classes = step.old, [0, 1, 2, 3]
    else:
        strategy = supervised.Naive(model=model, **options)
    vars(strategy).update(dataloader=[batch], _stop_training=False)
    strategy.model.train()
    strategy.training_epoch()
    step.check(model)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ER", "DER++", "iCaRL"])
def test_streams_end_as_avalanches_do(tmp_path: Path, avalanche: Any, name: str) -> None:
    supervised = importlib.import_module("avalanche.training.supervised")
    utils = importlib.import_module("avalanche.benchmarks.utils")
    samples, test = blobs(900, seed=1), blobs(600, seed=2)
    items = utils.AvalancheDataset(
        [torch.utils.data.TensorDataset(prepare(samples[0]), samples[1])],
        data_attributes=[utils.DataAttribute(samples[1].tolist(), "targets")],
    )
    shares: dict[str, list[float]] = {"theirs": [], "ours": [], "ours with swaps": []}
    for seed in range(3):
        torch.manual_seed(seed)
        benchmark = importlib.import_module("avalanche.benchmarks").nc_benchmark(
            items, items, n_experiences=3, task_labels=False, fixed_class_order=[*range(CLASSES)]
        )
        net = Net()
        # Avalanche's loss of iCaRL is a mean over outputs, ours and the paper's a sum.
        rate = RATE * CLASSES if name == "iCaRL" else RATE
        options = {"optimizer": torch.optim.SGD(net.parameters(), lr=rate), "evaluator": None, "train_mb_size": 12,
                   "train_epochs": 2}  # fmt: skip
        if name == "DER++":
            strategy = supervised.DER(model=net, mem_size=36, batch_size_mem=12, alpha=ALPHA, beta=BETA, **options)
        elif name == "iCaRL":
            strategy = supervised.ICaRL(
                feature_extractor=net.feature_extractor, classifier=net.train_classifier, memory_size=36,
                buffer_transform=None, fixed_memory=True, eval_mb_size=100, **options,
            )  # fmt: skip
        else:
            strategy = supervised.Replay(model=net, criterion=nn.CrossEntropyLoss(), mem_size=36, **options)
        for experience in benchmark.train_stream:
            strategy.train(experience, num_workers=0)
        strategy.model.eval()
        with torch.no_grad():
            shares["theirs"].append(share(strategy.model(prepare(test[0])).argmax(1), test[1]))
        for way, swap in (("ours", None), ("ours with swaps", RandomSwap(1.0))):
            shares[way].append(ours(tmp_path / f"{way}{seed}", name, swap, seed, samples, test))
    means = {way: float(np.mean(values)) for way, values in shares.items()}
    assert means["theirs"] > 0.4
    assert means["ours"] > means["theirs"] - 0.1
    assert means["ours with swaps"] > means["theirs"] - 0.05


@pytest.fixture
def checkout() -> Path:
    """Return the folder of Mammoth."""
    named = os.environ.get("MEMHIER_MAMMOTH")
    if named is None:
        pytest.skip("MEMHIER_MAMMOTH is not set: the folder of a checkout of Mammoth")
    return Path(named)


@pytest.mark.long
def test_mammoths_trainer_ends_as_well_with_ours(tmp_path: Path, checkout: Path) -> None:
    for package in ("timm", "kornia", "torchvision", "onedrivedownloader"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"Mammoth imports {package}, which is not installed")
    try:
        data_set_folder("mnist", "mnist")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    module = "memhier.benchmarks.workloads.replay.mammoth_trainer"
    command = [sys.executable, "-m", module, str(checkout), "--images", "3000", "--seeds", "1"]
    there = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "MEMHIER_DATA": str(data_folder())}
    done = subprocess.run(command, env=there, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    theirs, plain, swapped = (float(share) for share in re.findall(r": ([\d.]+) % of 1 seeds", done.stdout))
    assert theirs > 40
    assert plain > theirs - 15
    assert swapped > theirs - 15
    assert not list(tmp_path.glob("tmp*")), "it left a temporary folder behind"


@pytest.fixture
def mammoth(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> Callable[[str], Any]:
    """Return a function that loads a file of Mammoth's."""

    def load(name: str, **more: Any) -> Any:
        spec = importlib.util.spec_from_file_location(f"mammoth_{name.replace('/', '_')}", checkout / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        for part in STAND_INS:
            monkeypatch.setitem(sys.modules, part, mock.MagicMock())
        sys.modules["models.utils.continual_model"].ContinualModel = object  # type: ignore[attr-defined]
        sys.modules["utils.conf"].get_device = lambda *_: "cpu"  # type: ignore[attr-defined]
        sys.modules["utils.augmentations"].apply_transform = lambda images, *_, **__: images  # type: ignore[attr-defined]
        spec.loader.exec_module(module)
        return module

    return load


def trainer(model: Any, buffer: Any, net: nn.Module, **more: Any) -> Any:
    """Return the `self` of a model of Mammoth's: `observe` takes a step with it."""
    named = {"optim_wd": 0, "opt_wd": 0, "use_original_icarl_transform": 0, "alpha": ALPHA, "beta": BETA}
    args = SimpleNamespace(buffer_size=36, minibatch_size=12, **named)
    self = SimpleNamespace(
        args=args, net=net, opt=torch.optim.SGD(net.parameters(), lr=RATE), loss=nn.functional.cross_entropy,
        buffer=buffer, transform=None, device="cpu", **more,
    )  # fmt: skip
    for name in ("get_loss", "wd"):
        if hasattr(model, name):
            setattr(self, name, getattr(model, name).__get__(self))
    self.observe = model.observe.__get__(self)
    return self


class Drawn:
    """A buffer of Mammoth's that gives the batch which our method drew."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def is_empty(self) -> bool:
        return False

    def get_data(self, *_: Any, **__: Any) -> tuple[Any, ...]:
        return self.values

    def add_data(self, **_: Any) -> None:
        return


def test_a_step_is_mammoths_er_and_derpp(tmp_path: Path, mammoth: Callable[[str], Any]) -> None:
    step = Step(tmp_path / "er", "ER")
    model = copy.deepcopy(step.before)
    trainer(mammoth("models/er").Er, Drawn(*step.memory), model).observe(*step.stream, step.images)
    step.check(model)
    step = Step(tmp_path / "der", "DER++")
    model = copy.deepcopy(step.before)
    trainer(mammoth("models/derpp").Derpp, Drawn(*step.memory, step.logits), model).observe(*step.stream, step.images)
    step.check(model)


def test_a_step_is_mammoths_icarl(tmp_path: Path, mammoth: Callable[[str], Any]) -> None:
    step = Step(tmp_path / "b", "iCaRL", rate=RATE / CLASSES)
    model = copy.deepcopy(step.before)
    more = {"current_task": 2, "n_past_classes": 4, "old_net": step.old, "eye": torch.eye(CLASSES),
            "register_buffer": lambda *_: None, "classes_so_far": torch.arange(4)}  # fmt: skip
    together = [torch.cat([new, old]) for new, old in zip(step.stream, step.memory, strict=True)]
    trainer(mammoth("models/icarl").ICarl, None, model, **more).observe(*together, None)
    step.check(model)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ER", "DER++"])
def test_streams_end_as_mammoths_do_with_its_buffer_and_with_ours(
    tmp_path: Path, mammoth: Callable[[str], Any], name: str
) -> None:
    images, labels = blobs(900, seed=1)
    test, truth = blobs(600, seed=2)
    model = mammoth("models/er").Er if name == "ER" else mammoth("models/derpp").Derpp
    schema: dict[str, Any] = {"examples": ("float32", (1, 6, 6))}
    if name == "DER++":
        schema["logits"] = Field("float32", (CLASSES,), mutable=True)
    shares: dict[str, list[float]] = {"theirs": [], "in ours": [], "ours": [], "ours with swaps": []}
    for seed in range(4):
        np.random.seed(seed)  # noqa: NPY002  # Mammoth draws from it
        torch.manual_seed(seed)
        nets = [Net(), Net()]
        carousel = CarouselBuffer(tmp_path / f"m{seed}", memory=36, schema=schema, swap=None, seed=seed)
        buffers = [mammoth("utils/buffer").Buffer(36), MammothBuffer(carousel)]
        for way, net, buffer in zip(shares, nets, buffers, strict=False):
            own = trainer(model, buffer, net)
            for first in (0, 2, 4):
                some = torch.nonzero((labels == first) | (labels == first + 1))[:, 0]
                for _ in range(2):
                    for batch in blocks(some[torch.randperm(len(some))], 12):
                        own.observe(prepare(images[batch]), labels[batch], prepare(images[batch]))
            shares[way].append(share(net(prepare(test)).argmax(1), truth))
        carousel.close()
        for way, swap in (("ours", None), ("ours with swaps", RandomSwap(1.0))):
            shares[way].append(ours(tmp_path / f"{way}{seed}", name, swap, seed, (images, labels), (test, truth)))
    means = {way: float(np.mean(values)) for way, values in shares.items()}
    assert means["theirs"] > 0.4
    assert abs(means["in ours"] - means["theirs"]) < 0.1
    assert abs(means["ours"] - means["theirs"]) < 0.1
    assert means["ours with swaps"] > means["theirs"] - 0.05


def ours(
    place: Path, name: str, swap: Any, seed: int, samples: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> float:
    """Return the share that our method gets right of the test samples after a stream."""
    kind: Any = METHODS[name]
    images, labels = samples
    with CarouselBuffer(
        place,
        memory=36,
        schema=kind.schema((6, 6), CLASSES),
        admit="class_balanced" if name == "iCaRL" else "reservoir",
        swap=swap,
        seed=seed,
    ) as buffer:
        learner = kind(Net, buffer, prepare, classes=CLASSES, rate=RATE, batch=12, epochs=2, seed=seed)
        for first in (0, 2, 4):
            some = (labels == first) | (labels == first + 1)
            learner.learn_task(images[some], labels[some])
        return share(learner.predict(prepare(test[0])), test[1])


def share(said: Tensor, truth: Tensor) -> float:
    return float((said == truth).float().mean())

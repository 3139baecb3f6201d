"""Replay latents instead of images: the lower layers of a network are frozen, and their outputs are remembered.

A small network learns five classes of images, all of its layers. Then its convolutions are frozen, and the other five
classes come one after another; only the upper layers learn. They replay the outputs of the convolutions (latent replay,
Pellegrini et al., IROS 2020), in a buffer that holds these as floats, as int8, or as product codes, in the same bytes
of DRAM.

    python docs/examples/latent_replay.py                             # CIFAR-10, or generated images if it is missing
    python docs/examples/latent_replay.py --memory 16MiB --seed 1
    python docs/examples/latent_replay.py --quick                     # a few seconds

CIFAR-10 is read from the folder that MEMHIER_DATA names; see `memhier.benchmarks.datasets`.

It prints the accuracy over all ten classes at the end, without replay and with each kind of buffer: from its memory
alone, and with storage behind it.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from memhier.benchmarks.datasets import Images, load_images
from memhier.recsys import CarouselBuffer
from memhier.recsys.replay import Field, ProductCodes

CLASSES, FIRST, BATCH, SHAPE = 10, 5, 64, (32, 8, 8)


def generated(count: int, seed: int) -> Images:
    """Return images that show one of 10 coarse patterns of their class, moved, under noise."""
    random = np.random.default_rng(seed)
    patterns = random.integers(0, 2, (CLASSES, 10, 8, 8, 3), np.uint8)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = random.integers(0, CLASSES, count)
        images = 150 * patterns[labels, random.integers(0, 10, count)].repeat(4, axis=1).repeat(4, axis=2)
        return images + random.integers(0, 100, images.shape, np.uint8), labels

    return Images(*draw(count), *draw(1000))


def read_images(data: str, quick: bool, seed: int) -> Images:
    """Return images: real ones where they are."""
    if data != "generated":
        try:
            return load_images(data, 5_000 if quick else None)
        except FileNotFoundError as error:
            print(f"{error}; generated images take its place")
    return generated(6_000 if quick else 20_000, seed)


class Network:
    """A network of convolutions below, which are frozen after the first classes, and of layers above."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.below = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.above = nn.Sequential(
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, CLASSES)
        )

    @torch.no_grad()
    def latents(self, images: np.ndarray) -> np.ndarray:
        """Return the outputs of the convolutions below, float32 [n, *SHAPE]."""
        parts = [self.below(as_input(images[start : start + 500])) for start in range(0, len(images), 500)]
        return torch.cat(parts).numpy()

    @torch.no_grad()
    def accuracy(self, latents: np.ndarray, labels: np.ndarray) -> float:
        """Return the share of latents that the layers above name rightly."""
        parts = torch.from_numpy(latents).split(1000)
        said = torch.cat([self.above(part).argmax(1) for part in parts]).numpy()
        return float((said == labels).mean())


def as_input(images: np.ndarray) -> torch.Tensor:
    """Return pixels as floats from -1 to 1, channels first."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1)


def learn_first(network: Network, images: np.ndarray, labels: np.ndarray, epochs: int, seed: int) -> None:
    """Learn the first classes with all layers."""
    optimizer = torch.optim.Adam([*network.below.parameters(), *network.above.parameters()], lr=1e-3)
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        for some in np.array_split(random.permutation(len(images)), max(1, len(images) // BATCH)):
            logits = network.above(network.below(as_input(images[some])))
            step(optimizer, nn.functional.cross_entropy(logits, torch.from_numpy(labels[some])))


def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Take a step of training."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def learn_rest(
    network: Network, latents: np.ndarray, labels: np.ndarray, seed: int, buffer: CarouselBuffer | None
) -> None:
    """Learn the other classes, one after another, each latent once; the first ones are in the buffer."""
    optimizer = torch.optim.Adam(network.above.parameters(), lr=1e-3)
    random = np.random.default_rng(seed)
    first = np.flatnonzero(labels < FIRST)
    if buffer is not None:
        for some in np.array_split(random.permutation(first), max(1, len(first) // 256)):
            buffer.add({"latent": latents[some]}, labels=labels[some])
    for label in range(FIRST, CLASSES):
        of_class = random.permutation(np.flatnonzero(labels == label))
        for some in np.array_split(of_class, max(1, len(of_class) // BATCH)):
            new, marks = torch.from_numpy(latents[some]), torch.from_numpy(labels[some])
            batch = None if buffer is None else buffer.sample(3 * BATCH)
            if batch is not None:
                old = batch.tensors()
                new, marks = torch.cat([new, old["latent"]]), torch.cat([marks, old["labels"]])
            step(optimizer, nn.functional.cross_entropy(network.above(new), marks))
            if buffer is not None and batch is not None:
                buffer.feedback(batch)
                buffer.add({"latent": latents[some]}, labels=labels[some])


def main() -> None:
    """Read the arguments, learn with each kind of buffer, and print the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", choices=["cifar10", "generated"])
    parser.add_argument("--memory", default="8MiB", help="DRAM for replay (default: 8MiB)")
    parser.add_argument("--epochs", type=int, default=3, help="over the first classes (default: 3)")
    parser.add_argument("--folder", type=Path, help="for the buffers; a temporary one by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer images")
    args = parser.parse_args()

    images = read_images(args.data, args.quick, args.seed)
    network = Network(args.seed)
    first = images.train_labels < FIRST
    learn_first(network, images.train[first], images.train_labels[first], args.epochs, args.seed)
    latents, held_out = network.latents(images.train), network.latents(images.test)
    above = {name: values.clone() for name, values in network.above.state_dict().items()}

    def accuracy(buffer: CarouselBuffer | None) -> float:
        network.above.load_state_dict(above)
        learn_rest(network, latents, images.train_labels, args.seed, buffer)
        return network.accuracy(held_out, images.test_labels)

    print(f"no replay: {accuracy(None):.1%}")
    codes = ProductCodes.train(latents[first][:2000], parts=256, seed=args.seed)
    codecs: dict[str, Any] = {"float": None, "int8": "int8", "product codes": codes}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for title, codec in codecs.items():
            schema = {"latent": Field("float32", SHAPE, codec=codec)}
            for way, swap in (("memory alone", None), ("memory and storage", "random")):
                place = Path(folder) / f"{title}-{way}".replace(" ", "-")
                with CarouselBuffer(place, memory=args.memory, schema=schema, swap=swap, seed=args.seed) as buffer:
                    said = accuracy(buffer)
                    print(f"{title}, {way}: {said:.1%}; {buffer.capacity:,} latents fit in {args.memory} of DRAM, "
                          f"{buffer.memory_bytes / 2**20:.1f} MiB with all else")  # fmt: skip


if __name__ == "__main__":
    main()

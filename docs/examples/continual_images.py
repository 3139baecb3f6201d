"""Learn a stream of tasks of images, and remember the first one.

A small network learns ten classes, two at a time, and sees each image once. Without replay it forgets the classes of
earlier tasks. `CarouselBuffer` keeps all images on SSD and a few in DRAM, and exchanges them while the network trains.

    python docs/examples/continual_images.py                          # MNIST, or generated images if it is missing
    python docs/examples/continual_images.py --data fashion-mnist --memory 500 --seed 1
    python docs/examples/continual_images.py --quick                  # a few seconds

MNIST is read from the folder that MEMHIER_DATA names; see `memhier.benchmarks.datasets`.

It prints the accuracy over all classes after the last task, for three learners that differ in replay alone: none, a
memory of the same DRAM without storage, and the same memory with storage behind it.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from memhier.benchmarks.datasets import Images, load_images
from memhier.recsys import CarouselBuffer

CLASSES, SIDE, BATCH = 10, 28, 32


def generated(train: int, test: int, seed: int) -> Images:
    """Return images that show one of 20 coarse patterns of their class, moved, under noise."""
    random = np.random.default_rng(seed)
    patterns = (random.random((CLASSES, 20, 7, 7)) < 0.3).astype(np.uint8)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = random.integers(0, CLASSES, count)
        images = 180 * patterns[labels, random.integers(0, 20, count)].repeat(4, axis=1).repeat(4, axis=2)
        for image in images:
            image[:] = np.roll(image, random.integers(-1, 2, 2), (0, 1))
        return images + random.integers(0, 70, images.shape, np.uint8), labels

    return Images(*draw(train), *draw(test))


def read_images(data: str, quick: bool, seed: int) -> tuple[str, Images]:
    """Return a name for the images, and the images: real ones where they are."""
    if data != "generated":
        try:
            return data, load_images(data, 12_000 if quick else None)
        except FileNotFoundError as error:
            print(f"{error}; generated images take its place")
    return "generated images", generated(6_000 if quick else 30_000, 2_000, seed)


def as_input(images: torch.Tensor) -> torch.Tensor:
    """Return pixels as floats from -1 to 1, flat."""
    return images.reshape(len(images), -1).float().div_(127.5).sub_(1)


def learn(images: Images, buffer: CarouselBuffer | None, seed: int) -> float:
    """Learn two classes at a time, each image once; return the accuracy over all classes at the end."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(SIDE * SIDE, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    random = np.random.default_rng(seed)
    for task in random.permutation(CLASSES).reshape(-1, 2):
        some = random.permutation(np.flatnonzero(np.isin(images.train_labels, task)))
        for start in range(0, len(some), BATCH):
            batch = some[start : start + BATCH]
            pixels, labels = images.train[batch], images.train_labels[batch]
            loss = nn.functional.cross_entropy(model(as_input(torch.from_numpy(pixels))), torch.from_numpy(labels))
            replayed = buffer.sample(BATCH) if buffer is not None and len(buffer) else None
            if replayed is not None:  # old samples beside the new ones
                old = replayed.tensors()
                loss = loss + nn.functional.cross_entropy(model(as_input(old["image"])), old["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if buffer is not None and replayed is not None:
                buffer.feedback(replayed)  # ends the step: some of them leave memory, others are read for the next one
            if buffer is not None:
                buffer.add({"image": pixels}, labels=labels)
    with torch.no_grad():
        said = model(as_input(torch.tensor(images.test))).argmax(1).numpy()
    return float((said == images.test_labels).mean())


def main() -> None:
    """Read the arguments, learn three times, and print the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist", choices=["mnist", "fashion-mnist", "generated"])
    parser.add_argument("--memory", type=int, default=100, help="images in DRAM (default: 100)")
    parser.add_argument("--folder", type=Path, help="for the buffers; a temporary one by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer images")
    args = parser.parse_args()

    name, images = read_images(args.data, args.quick, args.seed)
    schema = {"image": ("uint8", (SIDE, SIDE))}
    print(f"{name}: {len(images.train):,} images in 5 tasks of 2 classes; {args.memory} images in memory")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(f"no replay: {learn(images, None, args.seed):.1%}")
        # Without swaps memory keeps those images that it took as they came: an even sample of the stream.
        for title, swap in (("memory alone", None), ("memory and storage", "random")):
            place = Path(folder) / title.replace(" ", "-")
            with CarouselBuffer(place, memory=args.memory, schema=schema, swap=swap, seed=args.seed) as buffer:
                accuracy, stats = learn(images, buffer, args.seed), buffer.stats()
                print(f"{title}: {accuracy:.1%}; {stats['memory_samples']} images in DRAM, "
                      f"{stats['storage_samples']:,} on SSD, {stats['swapped']:,} swapped")  # fmt: skip


if __name__ == "__main__":
    main()

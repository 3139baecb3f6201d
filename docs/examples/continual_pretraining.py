"""Train a small language model on one domain, then on another, and replay a share of the first.

A recurrent model reads the paragraphs of WikiText-2, then the sentences of the Brown corpus, as words. Training on the
second domain spoils the first, unless a share of each step comes from a `CarouselBuffer` of it. Sequences have lengths
of their own: memory and storage hold as many as their bytes allow, and steps train on rows packed to one length.

    python docs/examples/continual_pretraining.py                     # or generated words if the texts are missing
    python docs/examples/continual_pretraining.py --memory 1MiB --steps 600
    python docs/examples/continual_pretraining.py --quick             # a few seconds

Texts are read from the folder that MEMHIER_DATA names; see `memhier.benchmarks.datasets`.

It prints the perplexity per word on held-out text of both domains, for each share of replay.
"""

import argparse
import collections
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from memhier.benchmarks.datasets import data_set_folder
from memhier.benchmarks.workloads.decode.language.text import brown_lines, wikitext_lines
from memhier.recsys import CarouselBuffer
from memhier.recsys.replay import Field
from memhier.recsys.replay.packing import SourceShares, pack_rows

LONGEST, WORDS, LENGTH, BATCH, HELD = 512, 4000, 64, 16, 200
Texts = list[np.ndarray]


def generated(count: int, seed: int) -> list[str]:
    """Return lines of words, each of which is one of two that may follow the one before."""
    random = np.random.default_rng(seed)
    follow = random.integers(0, 60, (60, 2))
    lines = []
    for size in random.geometric(0.04, count) + 3:
        words = [int(random.integers(60))]
        for turn in random.integers(0, 2, size):
            words.append(int(follow[words[-1], turn]))
        lines.append(" ".join(map(str, words)))
    return lines


def read_domains(data: str) -> list[Texts]:
    """Return the sequences of both domains, int32 [length] each, in random order."""
    domains = [generated(2500, 1), generated(2500, 2)]
    if data != "generated":
        try:
            folders = data_set_folder("wikitext-2"), data_set_folder("brown")
            domains = [wikitext_lines(folders[0] / "valid.txt.xz"), brown_lines(folders[1] / "brown.zip")]
        except FileNotFoundError as error:
            print(f"{error}; generated words take its place")
    counts = collections.Counter(word for lines in domains for line in lines for word in line.lower().split())
    number_of = {word: number for number, (word, _) in enumerate(counts.most_common(WORDS - 2), 2)}  # 0 pads, 1 is rare
    found = []
    for lines in domains:
        coded = [
            np.array([number_of.get(word, 1) for word in line.lower().split()][:LONGEST], np.int32) for line in lines
        ]
        found.append([coded[number] for number in np.random.default_rng(0).permutation(len(coded))])
    return found


class WordModel(nn.Module):
    """A recurrent network that predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = (
            nn.Embedding(WORDS, 64),
            nn.GRU(64, 128, batch_first=True),
            nn.Linear(128, WORDS),
        )

    def loss(self, texts: Texts) -> torch.Tensor:
        """Return the mean cross-entropy of the words of sequences, packed to rows; no word is predicted across two."""
        offsets = np.cumsum([0, *map(len, texts)])
        rows = pack_rows(np.concatenate(texts), offsets, LENGTH)
        words = torch.from_numpy(rows.tokens.astype(np.int64))
        segments = torch.from_numpy(rows.segments)
        inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        states = self.body(self.embed(words[:, :-1]))[0][inside]
        return nn.functional.cross_entropy(self.head(states), words[:, 1:][inside])


@torch.no_grad()
def perplexity(model: WordModel, texts: Texts) -> float:
    """Return the perplexity per word."""
    return float(model.loss(texts).exp())


def train(
    model: WordModel, stream: Iterator[np.ndarray], steps: int, share: float, buffer: CarouselBuffer | None
) -> None:
    """Train on a stream, of which a share is replaced by samples of the buffer."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    shares = SourceShares({"new": 1 - share, "old": share} if share else {"new": 1})
    for _ in range(steps):
        counts = shares.counts(BATCH)
        texts = list(itertools.islice(stream, counts["new"]))
        if buffer is not None and counts.get("old"):
            batch = buffer.sample(counts["old"])
            texts += batch.ragged("text")
            buffer.feedback(batch)
        loss = model.loss(texts)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def main() -> None:
    """Read the arguments, train on both domains with several shares of replay, and print the perplexities."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="texts", choices=["texts", "generated"])
    parser.add_argument("--memory", default="664KiB", help="DRAM for replay (default: 664KiB)")
    parser.add_argument("--steps", type=int, default=400, help="training steps on each domain (default: 400)")
    parser.add_argument("--folder", type=Path, help="for the buffer; a temporary one by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    args = parser.parse_args()

    steps = 60 if args.quick else args.steps
    first, second = read_domains(args.data)
    held_out = [first[:HELD], second[:HELD]]
    first, second = first[HELD:], second[HELD:]
    torch.manual_seed(args.seed)
    model = WordModel()
    train(model, itertools.cycle(first), steps, 0, None)
    after = {name: values.clone() for name, values in model.state_dict().items()}
    print(f"after the first domain: perplexity {perplexity(model, held_out[0]):.1f} on it")
    mean = int(np.mean([len(text) for text in first]))
    schema = {"text": Field("int32", (None,), longest=LONGEST, mean=mean)}
    for share in (0.0, 0.01, 0.05, 0.25):
        with (
            tempfile.TemporaryDirectory(dir=args.folder) as folder,
            CarouselBuffer(Path(folder) / "buffer", memory=args.memory, schema=schema, seed=args.seed) as buffer,
        ):
            for start in range(0, len(first), 100):
                buffer.add({"text": first[start : start + 100]})
            model.load_state_dict(after)
            train(model, itertools.cycle(second), steps, share, buffer)
            old, new = (perplexity(model, texts) for texts in held_out)
            print(f"replay {share:.0%}: perplexity {old:.1f} on the first domain, {new:.1f} on the second; "
                  f"{len(buffer)} of {buffer.stats()['storage_samples']:,} sequences in DRAM")  # fmt: skip


if __name__ == "__main__":
    main()

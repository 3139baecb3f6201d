"""Train a small language model on one kind of text after another, and keep the first kind.

A character model reads the docstrings of this Python installation, then its code, then the names of Unicode's
characters. Training on the later ones spoils the first. `CarouselBuffer` keeps all sequences on SSD, of any length, and
mixes old ones into each step.

    python docs/examples/replay_language_model.py
    python docs/examples/replay_language_model.py --memory 128 --steps 500
    python docs/examples/replay_language_model.py --quick             # a few seconds

It prints the perplexity per character on held-out text of the first kind: right after training on it, and at the end,
without replay, with replay from a memory alone, and with replay from a memory of the same DRAM before the storage.
"""

import argparse
import ast
import itertools
import sysconfig
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from memhier.recsys import CarouselBuffer
from memhier.recsys.replay import Field

LONGEST, LETTERS, BATCH = 64, 128, 16
Texts = list[np.ndarray]


def sequences(texts: Iterable[str], count: int) -> Texts:
    """Return the first lines of texts, as bytes in ASCII: uint8 [length], of different lengths."""
    lines = (" ".join(line.split()) for text in texts for line in text.splitlines())
    codes = (np.frombuffer(line.encode("ascii", "replace"), np.uint8)[:LONGEST] for line in lines if len(line) > 20)
    return list(itertools.islice(codes, count))


def functions(docstrings: bool) -> Iterator[str]:
    """Yield the docstrings of the functions of the standard library, or their code."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                has = ast.get_docstring(node)
                yield (has or "") if docstrings else "\n".join(map(ast.unparse, node.body[has is not None :]))


def read_domains(count: int, seed: int) -> dict[str, Texts]:
    """Return as many sequences of docstrings, of code, and of the names of characters, in random order."""
    names = (unicodedata.name(chr(number), "") for number in range(0x20000))
    kinds = {"docstrings": functions(True), "code": functions(False), "character names": names}
    domains = {kind: sequences(texts, count) for kind, texts in kinds.items()}
    random = np.random.default_rng(seed)
    return {kind: [texts[number] for number in random.permutation(len(texts))] for kind, texts in domains.items()}


class CharacterModel(nn.Module):
    """A recurrent network that predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(LETTERS, 32), nn.GRU(32, 96, batch_first=True)
        self.head = nn.Linear(96, LETTERS)

    def loss(self, texts: Texts) -> torch.Tensor:
        """Return the mean cross-entropy of the characters of sequences, of which each may be of any length."""
        padded = nn.utils.rnn.pad_sequence([torch.tensor(text, dtype=torch.int64) for text in texts], True, -1)
        inputs = nn.functional.pad(padded[:, :-1].clamp(min=0), (1, 0))  # a zero begins each sequence
        logits = self.head(self.body(self.embed(inputs))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), padded.flatten(), ignore_index=-1)


@torch.no_grad()
def perplexity(model: CharacterModel, texts: Texts) -> float:
    """Return the perplexity per character."""
    return float(model.loss(texts).exp())


def train(
    domains: list[Texts], held_out: Texts, steps: int, seed: int, buffer: CarouselBuffer | None = None
) -> tuple[float, float]:
    """Train on one domain after another; return the perplexity on the first one's held-out text after it, and last."""
    torch.manual_seed(seed)
    model = CharacterModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    found = []
    for texts in domains:
        stream = itertools.cycle(texts)
        for _ in range(steps):
            new = list(itertools.islice(stream, BATCH))
            batch = buffer.sample(BATCH) if buffer is not None and len(buffer) else None
            loss = model.loss(new) if batch is None else model.loss(new) + model.loss(batch.ragged("text"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if buffer is not None and batch is not None:
                buffer.feedback(batch)
            if buffer is not None:
                buffer.add({"text": new})
        found.append(perplexity(model, held_out))
    return found[0], found[-1]


def main() -> None:
    """Read the arguments, train three times, and print the perplexities."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=int, default=64, help="sequences in DRAM (default: 64)")
    parser.add_argument("--steps", type=int, default=300, help="training steps on each kind of text (default: 300)")
    parser.add_argument("--folder", type=Path, help="for the buffers; a temporary one by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    args = parser.parse_args()

    steps = 20 if args.quick else args.steps
    held = 100
    domains = read_domains(held + steps * BATCH, args.seed)
    held_out = domains["docstrings"][:held]
    training = [texts[held:] for texts in domains.values()]
    print(", then ".join(f"{len(texts):,} lines of {kind}" for kind, texts in zip(domains, training, strict=True)))

    schema = {"text": Field("uint8", (None,), longest=LONGEST)}
    learn = partial(train, training, held_out, steps, args.seed)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        first, last = learn()
        print(f"after the docstrings: perplexity {first:.2f} on docstrings")
        print(f"no replay: perplexity {last:.2f}")
        for title, swap in (("memory alone", None), ("memory and storage", "random")):
            place = Path(folder) / title.replace(" ", "-")
            with CarouselBuffer(place, memory=args.memory, schema=schema, swap=swap, seed=args.seed) as buffer:
                last, stats = learn(buffer)[1], buffer.stats()
                print(f"{title}: perplexity {last:.2f}; {stats['memory_samples']} sequences in DRAM, "
                      f"{stats['storage_samples']:,} on SSD, {stats['swapped']:,} swapped")  # fmt: skip


if __name__ == "__main__":
    main()

"""kNN-LM: a language model that looks up how similar contexts went on (arXiv 1911.00172).

A small recurrent model is trained in the script. Then each context of the training text goes into a `ZoomIndex`: the
hidden state as the vector, the next word as its attribute. For a new context the index finds the nearest hidden states,
and their next words vote. The votes are mixed with the model's own probabilities, which come from `TopKSoftmax`.

    python docs/examples/knn_lm.py                     # the docstrings of this Python installation
    python docs/examples/knn_lm.py --text my_book.txt --words 20000
    python docs/examples/knn_lm.py --quick             # a few seconds

It prints the perplexity per word on held-out text, with the model alone and with both, the DRAM of index and decoder,
and a context with the words that each proposes, and both together.
"""

import argparse
import ast
import re
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from memhier.ann import TopKSoftmax, ZoomIndex

WIDTH, LENGTH, BATCH = 64, 32, 16


def docstrings() -> Iterator[str]:
    """Yield the docstrings of the standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                yield ast.get_docstring(node) or ""


def read_words(text: Path | None, most: int, vocabulary: int) -> tuple[torch.Tensor, list[str]]:
    """Return words of a text as numbers, int64 [n], paragraphs in random order, and names; 0 stands for rare words."""
    parts: list[list[str]] = []
    for part in docstrings() if text is None else re.split(r"\n\s*\n", text.read_text("utf-8", "replace")):
        parts.append(re.findall(r"\w+|[^\w\s]", part.lower())[:most])
        if (most := most - len(parts[-1])) <= 0:
            break
    words = [word for at in torch.randperm(len(parts)).tolist() for word in parts[at]]
    names = ["<rare>", *(word for word, _ in Counter(words).most_common(vocabulary - 1))]
    number = {name: at for at, name in enumerate(names)}
    return torch.tensor([number.get(word, 0) for word in words]), names


class WordModel(nn.Module):
    """A recurrent network; its hidden state times the output layer gives the logits of the next word."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(vocabulary, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return hidden states, float32 [..., length, WIDTH]."""
        return self.body(self.embed(words))[0]


def train(words: torch.Tensor, vocabulary: int, epochs: int) -> WordModel:
    """Train a model on a text."""
    model = WordModel(vocabulary)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    pieces = words[: len(words) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    for _ in range(epochs):
        for some in torch.randperm(len(pieces)).split(BATCH):
            batch = pieces[some]
            loss = nn.functional.cross_entropy(model.head(model(batch[:, :-1])).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def contexts(model: WordModel, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden state before each word of a text but the first, [n, WIDTH], and that word, [n]."""
    return model(words[:-1]), words[1:]


def votes(index: ZoomIndex, states: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the next words of the k nearest contexts, [n, k], and the share of each in the vote, nearest most."""
    found = index.search(states.numpy(), k, recall=0.9, fields=["next"])
    scale = found.distances.mean() / 2  # a context at this distance more has a vote of 1 / e
    weights = np.exp(-found.distances / scale)
    return np.asarray(found.fields["next"]), weights / weights.sum(axis=1, keepdims=True)


def main() -> None:
    """Read the arguments, train, build the index, and print perplexities."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file; docstrings by default")
    parser.add_argument("--words", type=int, default=100_000, help="of the text, the last tenth is held out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--k", type=int, default=32, help="contexts that vote (default: 32)")
    parser.add_argument("--share", type=float, default=0.25, help="of the votes in the mixture (default: 0.25)")
    parser.add_argument("--dram", default="8MiB", help="for the index (default: 8MiB)")
    parser.add_argument("--folder", type=Path, help="for the index; a temporary one by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer words")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    words, names = read_words(args.text, 20_000 if args.quick else args.words, 4_000)
    if len(words) < 5_000:
        parser.error(f"{args.text} has {len(words):,} words: expected at least 5,000 to learn from")
    held = len(words) // 10
    model = train(words[:-held], len(names), args.epochs)
    keys, following = contexts(model, words[:-held])
    states, targets = contexts(model, words[-held:][:2_000])
    some = torch.randperm(len(keys))[:4_000]  # the decoder learns from contexts of the whole text
    decoder = TopKSoftmax.from_linear(model.head, k=5, contexts=keys[some], seed=args.seed)
    alone = decoder.log_prob(states, targets).exp().numpy()

    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        ZoomIndex.build(
            Path(folder) / "contexts.index", keys.numpy(), attributes={"next": following.numpy()}, dram=args.dram,
            seed=args.seed,
        ) as index,
    ):  # fmt: skip
        proposed, weights = votes(index, states, args.k)
        voted = np.where(proposed == targets.numpy()[:, None], weights, 0).sum(axis=1)
        both = args.share * voted + (1 - args.share) * alone
        print(f"{len(index):,} contexts of {WIDTH} floats; {len(targets):,} words of held-out text")
        print(f"model alone: perplexity {np.exp(-np.log(alone).mean()):.1f}")
        print(f"with {args.k} nearest contexts: perplexity {np.exp(-np.log(both).mean()):.1f}")
        print(f"DRAM of the index: {index.memory_bytes / 2**20:.1f} MiB for {keys.nbytes / 2**20:.1f} MiB of vectors; "
              f"DRAM of the decoder beside the layer: {decoder.stats()['memory_bytes'] / 2**20:.1f} MiB")  # fmt: skip

        at = int(np.argmax(voted - alone))  # where the votes helped most
        before = " ".join(names[number] for number in words[-held:][max(0, at - 9) : at + 1].tolist())
        words_of_model, words_of_contexts = Counter[int](), Counter[int]()
        likely = decoder.topk(states[at : at + 1])[1]
        chances = decoder.log_prob(states[at : at + 1].expand(likely.shape[1], -1), likely[0]).exp()
        for number, chance in zip(likely[0].tolist(), chances.tolist(), strict=True):
            words_of_model[number] += (1 - args.share) * chance
        for number, weight in zip(proposed[at].tolist(), weights[at].tolist(), strict=True):
            words_of_contexts[number] += args.share * weight
        print(f"... {before}")
        together = words_of_model + words_of_contexts
        for name, scores in (
            ("the model proposes", words_of_model), ("the contexts propose", words_of_contexts), ("together", together)
        ):  # fmt: skip
            print(f"  {name}: {', '.join(names[number] for number, _ in scores.most_common(5))}")
        print(f"  the text goes on: {names[targets[at]]}")


if __name__ == "__main__":
    main()

"""Whether training through a DRAM budget ends where training in memory does, to the last bit, on real data.

``python -m memhier.benchmarks.workloads.embedding.quality --dir /path/on/the/device``: a DLRM on Criteo's log, sample
by sample in its order, and matrix factorisation on Gowalla, each with `torch.nn.EmbeddingBag(sparse=True)` in memory
and with memhier at a share of the rows in DRAM. Both kinds have the same first weights. AUC is of the samples before
they are trained on (the last half of the log); Recall@20 as LightGCN counts it.
"""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.embedding.common import DLRM, Ints, criteo_dac, gowalla
from memhier.benchmarks.workloads.options import folder_option, json_option
from memhier.policies import Belady
from memhier.recsys import Adagrad, EmbeddingBagCollection, EmbeddingBagConfig, lookahead

__all__ = ["main", "measure"]

DIM = 16
Look = Callable[[Tensor], Tensor]


class InMemory(nn.Module):
    """torch's tables with the first weights of memhier's."""

    def __init__(self, like: EmbeddingBagCollection) -> None:
        super().__init__()
        self.bags = [
            nn.EmbeddingBag(
                spec.rows, spec.dim, mode="sum", sparse=True,
                _weight=like.initial_weights(np.arange(spec.rows), table),
            )
            for table, spec in enumerate(like.tables.specs)
        ]  # fmt: skip
        self.weights = [bag.weight for bag in self.bags]
        self.optimizer = torch.optim.Adagrad(self.weights, lr=like.tables.optimizer.lr)

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows side by side, [n, tables * dim]."""
        offsets = torch.arange(len(ids))
        columns = [bag(ids[:, table].contiguous(), offsets) for table, bag in enumerate(self.bags)]
        return torch.cat(columns, 1)


def collection(sizes: list[int], share: float, batch: int, rate: float, folder: Path) -> EmbeddingBagCollection:
    """Return memhier's tables with a share of the rows in DRAM, at least those of a batch."""
    configs = [
        EmbeddingBagConfig(name=f"t{table}", num_embeddings=rows, embedding_dim=DIM) for table, rows in enumerate(sizes)
    ]
    slots = max(int(share * sum(sizes)), batch * len(sizes))
    return EmbeddingBagCollection(
        configs, optimizer=Adagrad(lr=rate), dram="2GiB", path=folder, policy=Belady(min(slots, sum(sizes)))
    )


def train_clicks(batches: list[tuple[Tensor, Tensor]], look: Look, step: Callable[[], None], tables: int) -> list[Any]:
    """Train a DLRM on a log; return its predictions, made before each batch is trained on."""
    torch.manual_seed(0)
    net = DLRM(tables, DIM)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.01)
    predicted = []
    for ids, labels in batches:
        logits = net(torch.zeros(len(ids), 13), look(ids))
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.binary_cross_entropy_with_logits(logits, labels))
        optimizer.step()
        step()
        predicted.append(logits.detach())
    return predicted


def clicks(folder: Path, share: float, limit: int | None) -> dict[str, Any]:
    """Return AUC and hashes of both kinds on Criteo's log."""
    ids, labels, sizes = criteo_dac()
    ids, labels = ids[:limit], labels[:limit]
    cut = range(0, len(ids), 32)
    batches = [(torch.from_numpy(ids[at : at + 32]), torch.from_numpy(labels[at : at + 32])) for at in cut]
    with collection(sizes, share, 32, 0.05, folder) as mine:
        theirs = InMemory(mine)
        found = {}

        def step() -> None:
            theirs.optimizer.step()
            theirs.optimizer.zero_grad()

        outputs = train_clicks(batches, theirs, step, len(sizes))
        found["in memory"] = _clicks(outputs, labels, theirs.weights)
        ahead = lookahead(batches, mine, ids=lambda batch: batch[0])
        outputs = train_clicks(ahead, lambda ids: mine(ids).values(), lambda: None, len(sizes))  # type: ignore[arg-type]
        weights = [mine.weights(np.arange(rows), table) for table, rows in enumerate(sizes)]
        found["memhier"] = _clicks(outputs, labels, weights)
        return found | {"stats": mine.stats(), "rows": sum(sizes)}


def _clicks(outputs: list[Tensor], labels: NDArray[np.float32], weights: list[Tensor]) -> dict[str, Any]:
    scores = torch.cat(outputs)
    half = len(scores) // 2
    return {"auc": auc(scores[half:].numpy(), labels[half:]), "hash": _digest([scores, *weights])}


def auc(scores: NDArray[np.float32], labels: NDArray[np.float32]) -> float:
    """Return the area under the ROC curve, ties counting half."""
    _, ranks, counts = np.unique(scores, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    positive = labels > 0.5
    hits, misses = int(positive.sum()), int((~positive).sum())
    return float((middle[ranks][positive].sum() - hits * (hits + 1) / 2) / max(1, hits * misses))


def factorise(batches: list[Tensor], look: Look, step: Callable[[], None]) -> None:
    """Train by the pairwise loss of BPR (Rendle et al., UAI 2009); a batch has user, item seen and item not seen."""
    for batch in batches:
        users, seen, other = look(batch)
        score = (users * (seen - other)).sum(1)
        torch.autograd.backward(nn.functional.softplus(-score).sum())
        step()


def ratings(folder: Path, share: float, epochs: int, limit: int | None) -> dict[str, Any]:
    """Return Recall@20 and hashes of both kinds on Gowalla."""
    pairs, held_out, users, items = gowalla()
    pairs = pairs[:limit]
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(epochs):
        order = rng.permutation(len(pairs))
        triples = np.concatenate([pairs[order], rng.integers(0, items, (len(pairs), 1))], 1)
        batches += [torch.from_numpy(triples[at : at + 128]) for at in range(0, len(triples), 128)]
    configs = [
        EmbeddingBagConfig(name="users", num_embeddings=users, embedding_dim=32, feature_names=["user"]),
        EmbeddingBagConfig(name="items", num_embeddings=items, embedding_dim=32, feature_names=["seen", "other"]),
    ]
    slots = max(int(share * (users + items)), 3 * 128)
    with EmbeddingBagCollection(
        configs, optimizer=Adagrad(lr=0.1), dram="2GiB", path=folder, policy=Belady(min(slots, users + items))
    ) as mine:
        theirs = InMemory(mine)

        def look(batch: Tensor) -> Any:
            ids = batch[:, 1:].t().reshape(-1)
            both = theirs.bags[1](ids, torch.arange(len(ids))).chunk(2)
            return theirs.bags[0](batch[:, 0].contiguous(), torch.arange(len(batch))), *both

        def step() -> None:
            theirs.optimizer.step()
            theirs.optimizer.zero_grad()

        factorise(batches, look, step)
        found = {"in memory": _ratings(theirs.weights, pairs, held_out)}
        ahead = lookahead(batches, mine, ids=lambda batch: batch)
        factorise(ahead, lambda batch: mine(batch).to_dict().values(), lambda: None)  # type: ignore[arg-type]
        weights = [mine.weights(np.arange(rows), table) for table, rows in enumerate((users, items))]
        found["memhier"] = _ratings(weights, pairs, held_out)
        return found | {"stats": mine.stats(), "rows": users + items}


def _ratings(weights: list[Tensor], pairs: Ints, held_out: dict[int, Ints]) -> dict[str, Any]:
    users, items = weights
    seen: dict[int, list[int]] = {}
    for user, item in pairs.tolist():
        seen.setdefault(user, []).append(item)
    recalls = []
    with torch.no_grad():
        for user, wanted in held_out.items():
            scores = items @ users[user]
            scores[seen.get(user, [])] = -torch.inf
            best = scores.topk(20).indices.numpy()
            recalls.append(np.isin(best, wanted).sum() / max(1, len(wanted)))
    return {"recall": float(np.mean(recalls)), "hash": _digest([users, items])}


def _digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def measure(folder: Path | None, share: float, epochs: int, limit: int | None) -> dict[str, Any]:
    """Return what both trainings gave."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        return {
            "criteo": clicks(Path(scratch) / "criteo", share, limit),
            "gowalla": ratings(Path(scratch) / "gowalla", share, epochs, limit),
        }


def record(found: dict[str, Any], share: float) -> Record:
    """Return the figures: the same quality, and the same bits."""
    figures = []
    for data, what in (("criteo", "auc"), ("gowalla", "recall")):
        for kind in ("in memory", "memhier"):
            name = f"{what} on {data}, {kind}"
            figures.append(Figure.of(name, found[data][kind][what], "share", "more", exact=True))
        same = float(found[data]["memhier"]["hash"] == found[data]["in memory"]["hash"])
        figures.append(Figure.of(f"same bits on {data} with {share:.0%} of the rows in DRAM", same, "1 is yes", "more"))
        stats = found[data]["stats"]
        back = stats["refetches"] + stats["queue_hits"]
        figures.append(Figure.of(f"rows fetched again on {data}", back, "rows", "neither"))
    return Record(figures, scale="80,000 samples of Criteo, Gowalla; rows of 16 and 32 floats")


@click.command()
@folder_option
@click.option("--share", default=0.01, show_default=True, help="Of the rows in DRAM.")
@click.option("--epochs", default=3, show_default=True, help="Of Gowalla.")
@click.option("--limit", type=int, help="Samples of each, from the first on.")
@json_option
def main(folder: Path | None, share: float, epochs: int, limit: int | None, out: Path | None) -> None:
    """Compare training through a DRAM budget with training in memory, on real data."""
    found = measure(folder, share, epochs, limit)
    shown = record(found, share)
    for figure in shown.figures:
        Console(width=120).print(f"{figure.name:60} {figure.value:.6g} {figure.unit}", highlight=False)
    if out is not None:
        shown.write(out, found=found)


if __name__ == "__main__":
    main()

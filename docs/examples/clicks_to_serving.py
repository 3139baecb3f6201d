"""From clicks to serving: train tables larger than their DRAM, export them, and search the items for a user.

Users and items get vectors, such that the inner product is large where a user clicked an item. The tables lie on SSD;
`lookahead` fetches the rows of a step before it. Training stops in the middle and goes on from its checkpoint. Then the
items become a `ZoomIndex`, which finds those of the largest inner product with a user.

    python docs/examples/clicks_to_serving.py                    # generated clicks
    python docs/examples/clicks_to_serving.py --data gowalla     # real check-ins, from the folder MEMHIER_DATA
    python docs/examples/clicks_to_serving.py --quick            # a few seconds

It prints the DRAM of tables and search beside the size of the vectors, the recall of the search against exact
search, and the hit rates: how often an item that the user clicked, and training did not see, is among those found.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from memhier.ann import ZoomIndex
from memhier.benchmarks.datasets import gowalla
from memhier.recsys import (
    Adagrad,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    QuantisedTable,
    Uniform,
    export_npy,
    export_quantised,
    lookahead,
)

DIMENSION, BATCH = 64, 1024


def generated(users: int, items: int, clicks: int, seed: int) -> np.ndarray:
    """Return clicks, int64 [n, 2]: each user likes items of two topics, and some items are popular."""
    random = np.random.default_rng(seed)
    topics = max(4, items // 100)
    likes = random.integers(0, topics, (users, 2))
    user = random.integers(0, users, clicks)
    topic = likes[user, random.integers(0, 2, clicks)]
    inside = (random.random(clicks) ** 2 * (items // topics)).astype(np.int64)  # items of small number are popular
    return np.stack([user, topic * (items // topics) + inside], axis=1)


def tables_of(folder: Path, users: int, items: int, dram: str, resume: bool) -> EmbeddingBagCollection:
    """Make the two tables, or open them as of their last checkpoint."""
    initial = Uniform(-0.1, 0.1)
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIMENSION, initial=initial)
        for name, rows in (("user", users), ("item", items))
    ]
    path = folder / "tables"
    return EmbeddingBagCollection(configs, optimizer=Adagrad(lr=0.1), dram=dram, path=path, resume=resume)


def train(tables: EmbeddingBagCollection, clicks: np.ndarray, first: int, last: int, seed: int) -> None:
    """Train the epochs from `first` to `last`; each ends with a checkpoint."""
    for epoch in range(first, last):
        order = np.random.default_rng([seed, epoch]).permutation(len(clicks))
        batches = [torch.from_numpy(clicks[order[at : at + BATCH]]) for at in range(0, len(clicks), BATCH)]
        losses = []
        for ids in lookahead(batches, tables, ids=lambda batch: batch):
            pooled = tables(ids)
            # Each user of the batch has to find the item clicked among all items of the batch.
            loss = torch.nn.functional.cross_entropy(pooled["user"] @ pooled["item"].T, torch.arange(len(ids)))
            loss.backward()  # trains the rows, too
            losses.append(loss.item())
        tables.checkpoint({"epochs": epoch + 1})
        stats = tables.stats()
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}; since they were opened, {stats['hits']:,} rows "
              f"were found in DRAM and {stats['refetches']:,} read again from SSD")  # fmt: skip


def hit_rate(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return how often the item wanted is among those found."""
    return float((found == wanted[:, None]).any(axis=1).mean())


def main() -> None:
    """Read the arguments, train, export, and search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="generated", choices=["generated", "gowalla"])
    parser.add_argument("--dram", default="14MiB", help="for the tables in training (default: 14MiB)")
    parser.add_argument("--epochs", type=int, default=2, help="in all, at least 2 (default: 2)")
    parser.add_argument("--k", type=int, default=20, help="items to find for a user (default: 20)")
    parser.add_argument("--folder", type=Path, help="for all files; a temporary one by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer clicks")
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error(f"--epochs {args.epochs}: expected at least 2, as training stops once in the middle")

    if args.data == "gowalla":
        clicks, users, items = gowalla()
        clicks = np.random.default_rng(args.seed).permutation(clicks)
    else:
        users, items, count = (30_000, 5_000, 100_000) if args.quick else (60_000, 20_000, 500_000)
        clicks = generated(users, items, count, args.seed)
    held_out, clicks = clicks[:1000], clicks[1000:]
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        half = args.epochs // 2
        with tables_of(folder, users, items, args.dram, resume=False) as tables:
            train(tables, clicks, 0, half, args.seed)
        # Another day, another process: the tables, the optimizer's state and the epoch come from the checkpoint.
        with tables_of(folder, users, items, args.dram, resume=True) as tables:
            train(tables, clicks, tables.extra["epochs"], args.epochs, args.seed)
            size = (users + items) * DIMENSION * 4 * 2  # weights, and the state of Adagrad
            print(f"DRAM of the tables: {tables.memory_bytes / 2**20:.1f} MiB for {size / 2**20:.1f} MiB of rows")
            export_npy(tables, folder / "items.npy", table=1)
            export_quantised(tables, folder / "users.safetensors", table=0, dtype="int8")

        vectors = np.load(folder / "items.npy", mmap_mode="r")
        with QuantisedTable(folder / "users.safetensors", dram="8MiB") as served:
            queries = served.rows(held_out[:, 0]).numpy()
        with ZoomIndex.build(folder / "items.index", vectors, metric="ip", dram="4MiB", seed=args.seed) as index:
            found = index.search(queries, args.k, recall=0.95)
            exact = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, : args.k]
            recall = np.mean([len(np.intersect1d(*pair)) for pair in zip(found.ids, exact, strict=True)]) / args.k
            print(f"DRAM of the search: {index.memory_bytes / 2**20:.1f} MiB for {vectors.nbytes / 2**20:.1f} MiB of "
                  f"vectors; {found.stats['page_requests'] / len(queries):.1f} pages read a user")  # fmt: skip
        print(f"recall at {args.k}: {recall:.3f}, declared 0.95")
        print(f"hit rate at {args.k}: {hit_rate(found.ids, held_out[:, 1]):.3f}; exact search "
              f"{hit_rate(exact, held_out[:, 1]):.3f}, at random {args.k / items:.4f}")  # fmt: skip


if __name__ == "__main__":
    main()

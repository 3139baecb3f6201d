"""An output layer of a language model in bf16 or fp16: time, memory and agreement against the full product.

``python -m memhier.benchmarks.workloads.decode.language.heads`` makes a layer of 128,256 words by 2,048, which says
that it is made (see ``made.py`` for its spectrum), or takes a model's own: ``--weights`` names its folder or
.safetensors file, ``--contexts`` an array of hidden states. The layer is mapped from the file; DRAM beyond it is the
decoder's codes, links and workspaces. Full products are torch's, in fp32 and in the layer's own type. Every way answers
the same states by turns, after 48 MB of other memory were touched, and warm; times are processor time of one thread. A
word counts as right if its logit, in double precision, is among the largest. ``positions`` are several states in one
call, as in speculative verification. FlashHead takes part if the package flash-head is installed; as it brings no
clustering, its clusters come from faiss's spherical k-means, a sixteenth of the words.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import faiss
import numpy as np
import torch
from torch import Tensor, nn

from memhier.ann import TopKSoftmax, open_head
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.peers.account import PeakMemory
from memhier.benchmarks.workloads.decode.clock import Floats, Ints, Way, measure
from memhier.benchmarks.workloads.decode.language.made import SPECTRA, made_contexts, write_made_head
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, rows_table, skip, workload
from memhier.io.outside import reading

__all__ = ["main"]

K = 10
ASKED = 512
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCK = 8192
_CANDIDATES = 4 * K
_FLASH_WORDS, _FLASH_ROUNDS = 16, 4

MEASURES = [
    Measure("top1", "top-1 agreement", "share", "more"),
    Measure("precision", "P@10", "share", "more"),
]
TIMES = [
    Measure("ms", "ms of a call", "ms", "less", clock=True),
    Measure("over_fp32", "speed-up over fp32", "times", "more", clock=True),
    Measure("over_half", "speed-up over half precision", "times", "more", clock=True),
]


def ways_of_memhier(head: nn.Linear, learned: Floats, options: dict[str, Any]) -> tuple[TopKSoftmax, list[Way], Row]:
    """Build the decoder; return its ways, and the cost of the build."""
    with PeakMemory() as peak:
        before = peak.private_bytes
        started = time.process_time()
        decoder = TopKSoftmax.from_linear(head, k=K, contexts=torch.from_numpy(learned), **options)
        seconds = time.process_time() - started
    index, stats = decoder.index, decoder.stats()
    held = index.memory_bytes
    ways = [
        Way(f"decoder, {method}", "", _answers(decoder, method), held, seconds)
        for method in ("graph", "preview")
        if f"precision_{method}" in stats
    ]
    ways.append(Way("decoder, auto", "", lambda states: decoder.topk(torch.from_numpy(states))[1].numpy(), held))
    ways.append(Way("decoder, certified", "", lambda x: decoder.certified_topk(torch.from_numpy(x))[1].numpy(), held))
    cost = {
        "build_s": seconds, "build_MiB": (peak.private_bytes - before) / 2**20, "MiB": held / 2**20,
        "layer_MiB": head.weight.nbytes / 2**20, "share": held / head.weight.nbytes, "width": stats["width"],
        "ways": str(dict(stats["choices"])),
    }  # fmt: skip
    return decoder, ways, cost | {key: stats[key] for key in stats if key.startswith("precision_")}


def _answers(decoder: TopKSoftmax, method: Any) -> Callable[[Floats], Ints]:
    return lambda states: decoder.index.topk(states, method=method).indices


def full_products(head: nn.Linear) -> Iterator[Way]:
    """Yield torch's full products in single precision and in the layer's type."""
    wide = head.weight.float()
    yield Way("full, fp32", "", lambda states: _topk(nn.functional.linear(torch.from_numpy(states), wide)), wide.nbytes)
    kind = head.weight.dtype
    yield Way(
        "full, half", "", lambda states: _topk(nn.functional.linear(torch.from_numpy(states).to(kind), head.weight))
    )


def flash_head(head: nn.Linear) -> Iterator[Way]:
    """Yield FlashHead, which answers the likeliest word of one state, if it is installed."""
    try:
        from flash_head.flash_head import FlashHead  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        return skip(f"FlashHead: {error}")
    started = time.process_time()
    rows = head.weight.float().numpy()
    clusters = faiss.Kmeans(
        rows.shape[1], len(rows) // _FLASH_WORDS, niter=_FLASH_ROUNDS, spherical=True, seed=0,
        min_points_per_centroid=1, max_points_per_centroid=_FLASH_WORDS,
    )  # fmt: skip
    clusters.train(rows)
    nearest = torch.from_numpy(clusters.index.search(rows, 1)[1][:, 0])
    del rows
    members = [torch.nonzero(nearest == one)[:, 0] for one in range(clusters.k)]
    longest = max(map(len, members))
    # A short list repeats its first word, as the package's own does.
    maps = torch.stack(
        [
            torch.cat([own, own[:1].expand(longest - len(own))])
            if len(own)
            else torch.zeros(longest, dtype=torch.int64)
            for own in members
        ]
    )
    centroids = torch.from_numpy(clusters.centroids.T.copy()).to(head.weight.dtype)
    model = FlashHead(head, centroids, maps)
    held = maps.nbytes + 3 * centroids.nbytes

    def answer(states: Floats) -> Ints:
        found = model.get_next_token(torch.from_numpy(states).to(head.weight.dtype)[:, None])
        return np.asarray(found).reshape(-1, 1)

    yield Way("FlashHead", "", answer, held, time.process_time() - started)


def truth_of(weight: Tensor, states: Floats) -> tuple[Floats, Floats]:
    """Return the tenth and the first of the largest logits of each state, in double precision."""
    asked = torch.from_numpy(states)
    best, rows = torch.empty(len(asked), 0), torch.empty(len(asked), 0, dtype=torch.int64)
    for start in range(0, len(weight), _BLOCK):
        logits = asked @ weight[start : start + _BLOCK].float().T
        names = torch.arange(start, start + logits.shape[1]).expand(len(asked), -1)
        best, at = torch.cat([best, logits], 1).topk(min(_CANDIDATES, len(weight)))
        rows = torch.cat([rows, names], 1).gather(1, at)
    exact = np.sort(exact_logits(weight, states, rows.numpy()), 1)
    return exact[:, -K], exact[:, -1]


def exact_logits(weight: Tensor, states: Floats, rows: Ints) -> Any:
    """Return logits of rows ``[n, c]``, float64."""
    found = [weight[torch.from_numpy(own)].double() @ torch.from_numpy(one).double()
             for own, one in zip(rows, states, strict=True)]  # fmt: skip
    return torch.stack(found).numpy()


def agreement(way: Way, weight: Tensor, states: Floats, truth: tuple[Floats, Floats]) -> Row:
    """Return the shares of the likeliest word and of the ten likeliest that a way finds, one state at a time."""
    # A full product computes the same for several states at a time.
    parts = np.array_split(states, len(states) // 32 + 1 if way.family.startswith("full") else len(states))
    found = np.concatenate([way.answer(part) for part in parts])
    logits = exact_logits(weight, states, found)
    tenth, first = truth
    right = {"way": way.name, "top1": float((logits[:, 0] >= first).mean())}
    if found.shape[1] == K:
        right["precision"] = float((logits >= tenth[:, None]).mean())
    return right


def times_of(ways: list[Way], asked: Floats, batch: int, rounds: int, form: str) -> list[Row]:
    """Measure all ways for one size of batch, cold and warm."""
    cold, warm = measure(ways, asked, batch, rounds).medians()

    def over(taken: dict[str, float], name: str) -> list[float]:
        return [taken[full] / taken[name] for full in ("full, fp32", "full, half")]

    return [
        {"way": way.name, "call": form, "ms": cold[way.name]}
        | dict(zip(("over_fp32", "over_half"), over(cold, way.name), strict=True))
        | {"ms_warm": warm[way.name]}
        | dict(zip(("over_fp32_warm", "over_half_warm"), over(warm, way.name), strict=True))
        for way in ways
    ]


def positions_of(decoder: TopKSoftmax) -> Way:
    """Return the call of one sequence of several positions, ``[1, T, D]``."""
    return Way("decoder, auto", "", lambda states: decoder.topk(torch.from_numpy(states)[None])[1][0].numpy())


def _topk(logits: Tensor) -> Ints:
    return torch.topk(logits, K).indices.numpy()


def _given_contexts(path: Path, dimension: int) -> Floats:
    with reading(path):
        found = np.load(path)
    if found.ndim != 2 or found.shape[1] != dimension:
        raise click.ClickException(f"{path}: has shape {list(found.shape)}: expected [n, {dimension}]")
    return np.ascontiguousarray(found, np.float32)


@workload
@click.option("--weights", type=click.Path(exists=True, path_type=Path), help="A model's folder or .safetensors file.")
@click.option("--tensor", help="Its output layer; lm_head.weight or tied embeddings by default.")
@click.option("--contexts", type=click.Path(exists=True, path_type=Path), help="Hidden states [n, D], a .npy file.")
@click.option("--words", default=128_256, show_default=True, help="Of the made layer.")
@click.option("--dimension", default=2048, show_default=True, help="Of the made layer.")
@click.option("--type", "kind", type=click.Choice(sorted(TYPES)), default="bf16", show_default=True)
@click.option("--spectrum", type=click.Choice(SPECTRA), default="matched", show_default=True, help="Of made numbers.")
@click.option("--learned", default=4000, show_default=True, help="Contexts that the decoder is built from.")
@click.option("--precision", default=0.999, show_default=True, help="Declared for the ten likeliest words.")
@click.option("--rank", type=int, help="Directions of the decoder's codes; by default the build finds them.")
@click.option(
    "--method", type=click.Choice(["auto", "preview"]), default="auto", show_default=True, help="Of the build."
)
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 4, 16, 64), show_default=True)
@click.option("--rounds", default=40, show_default=True)
@click.option("--peers/--no-peers", default=True, show_default=True, help="FlashHead, if installed.")
@torch.no_grad()
def main(
    weights: Path | None, tensor: str | None, contexts: Path | None, words: int, dimension: int, kind: str,
    spectrum: str, learned: int, precision: float, rank: int | None, method: str, batches: tuple[int, ...], rounds: int,
    peers: bool, scratch: Path,
) -> Outcome:  # fmt: skip
    """Compare the ways to the likeliest words of a language model's layer."""
    if weights is None:
        write_made_head(scratch / "model.safetensors", words, dimension, TYPES[kind], spectrum)
    head = open_head(weights or scratch, tensor)
    if head.weight.dtype == torch.float32:
        raise click.ClickException(f"{weights}: the layer is fp32: expected bf16 or fp16")
    states = (
        made_contexts(head.weight, learned + ASKED, spectrum)
        if contexts is None
        else _given_contexts(contexts, head.in_features)
    )
    asked = states[-min(ASKED, len(states) // 5) :]
    options = {"precision": precision, "rank": rank, "method": method}
    decoder, ours, cost = ways_of_memhier(head, states[: -len(asked)], options)
    ways = [*full_products(head), *ours]
    truth = truth_of(head.weight, asked)
    single = [*ways, *(flash_head(head) if peers else ())]
    right = [agreement(way, head.weight, asked, truth) for way in single]
    rows = []
    for batch in batches:
        rows += times_of(single if batch == 1 else ways, asked, batch, max(3, rounds // batch), str(batch))
    rows += times_of([*ways[:2], positions_of(decoder)], asked, 8, max(3, rounds // 4), "[1, 8] positions")
    made = " and ".join(
        f"{name} ({spectrum})"
        for name, given in (("a made layer", weights), ("made states", contexts))
        if given is None
    )
    shape = f"{head.out_features:,} words x {head.in_features:,}, {str(head.weight.dtype).removeprefix('torch.')}"
    title = f"{shape}; {made or 'given weights and states'}"
    memory = [{"way": way.name, "MiB beyond the layer": way.memory / 2**20, "build s": way.build_s} for way in single]
    shown = [
        rows_table(f"{title}: agreement with double precision", [{"precision": float("nan")} | row for row in right]),
        rows_table("CPU ms of a call: cold, after other work, and warm", rows),
        rows_table("memory", memory),
        rows_table("the decoder's build", [cost]),
    ]
    ten = [row for row in right if "precision" in row]
    figures = [
        *figures_of(right, MEASURES[:1], "{title}, {way}"),
        *figures_of(ten, MEASURES[1:], "{title}, {way}"),
        *figures_of(rows, TIMES, "{title}, {way}, {call}, cold"),
        *figures_of([cost], [Measure("share", "DRAM beyond the layer", "share", "less")], "{title}"),
    ]
    return Outcome(Record(figures, [], scale=title), shown, {"agreement": right, "times": rows, "build": cost})


if __name__ == "__main__":
    main()

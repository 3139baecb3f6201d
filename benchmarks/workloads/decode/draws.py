"""Draws of words by several samplers from a trained layer, against the full product, on real hidden states.

``python -m memhier.benchmarks.workloads.decode.draws`` runs on one thread. Each way answers a batch after 48 MB of
other memory were touched, as a model does between two words; a number is the mean of the rounds, as single states take
the full product. The full product comes alone, and with top-p and a draw as transformers make them. Then many draws for
one state each are compared with the probabilities of the full softmax: by total variation, beside that of as many exact
draws, and by chi-square over words pooled to eight expected draws.
"""

from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from memhier.ann.decoder import TopKSoftmax
from memhier.ann.decoder.module.truncation import Truncation, shares_of
from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.workloads.decode.clock import Way, measure
from memhier.benchmarks.workloads.decode.curve import DOMAINS
from memhier.benchmarks.workloads.decode.layers import TrainedLayer, load_domains
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, rows_table, workload

__all__ = ["main"]

SAMPLERS: dict[str, dict[str, Any]] = {
    "top_p 0.9": {"top_p": 0.9}, "pure": {}, "temperature 1.5, top_p 0.95": {"temperature": 1.5, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05}, "top_k 50": {"top_k": 50}, "epsilon_cutoff 0.0003": {"epsilon_cutoff": 0.0003},
}  # fmt: skip
_TOP_P = 0.9

OVER_PRODUCT = Measure("over_product", "over the product alone", "times", "more", clock=True)
OVER_SAMPLER = Measure("over_sampler", "over the product, top-p and a draw", "times", "more", clock=True)
VARIATION = Measure("variation", "total variation", "share", "less")


def decoder_of(layer: TrainedLayer) -> tuple[torch.nn.Linear, TopKSoftmax]:
    """Return the layer as a module, and its decoder."""
    head = torch.nn.Linear(*layer.weight.shape[::-1])
    head.weight.data, head.bias.data = torch.from_numpy(layer.weight), torch.from_numpy(layer.bias)
    return head, TopKSoftmax.from_linear(head, k=64, contexts=torch.from_numpy(layer.learned))


def draw_in_full(head: torch.nn.Linear, states: Tensor) -> Tensor:
    """Draw by top-p from all logits, in the steps of transformers."""
    logits = head(states)
    ordered, order = torch.sort(logits)
    out = ordered.softmax(-1).cumsum(-1) <= 1 - _TOP_P
    out[:, -1] = False
    kept = logits.masked_fill(out.scatter(1, order, out), -torch.inf)
    return torch.multinomial(kept.softmax(-1), 1)[:, 0]


def times_of(
    layer: TrainedLayer, head: torch.nn.Linear, decoder: TopKSoftmax, rounds: int, batches: tuple[int, ...]
) -> list[Row]:
    """Measure every sampler by size of batch."""
    ways = [
        Way("product", "", lambda states: head(torch.from_numpy(states)).numpy()),
        Way("product, top-p and a draw", "", lambda states: draw_in_full(head, torch.from_numpy(states)).numpy()),
        *(Way(name, "", _answers(decoder, options)) for name, options in SAMPLERS.items()),
    ]
    rows = []
    for batch in batches:
        cold = measure(ways, layer.asked, batch, max(3, rounds // (1 if batch < 8 else 3))).cold
        taken = {name: float(np.mean(each)) for name, each in cold.items()}
        for way in ways:
            over = {"over_product": taken["product"], "over_sampler": taken["product, top-p and a draw"]}
            shares = {name: full / taken[way.name] for name, full in over.items()}
            rows.append({"batch": batch, "way": way.name, "ms": taken[way.name]} | shares)
    return rows


def _answers(decoder: TopKSoftmax, options: dict[str, Any]) -> Any:
    return lambda states: decoder.sample(torch.from_numpy(states), **options).numpy()


def distances_of(layer: TrainedLayer, decoder: TopKSoftmax, draws: int, contexts: int) -> list[Row]:
    """Compare many draws for some states with their probabilities."""
    rows = []
    for name, options in SAMPLERS.items():
        before = sum(decoder.stats()["sampled_in_full"].values())
        found = [_distance(layer, decoder, options, draws, at) for at in range(contexts)]
        full = sum(decoder.stats()["sampled_in_full"].values()) - before
        keys = found[0].keys()
        row: Row = {"way": name, "draws": draws * contexts, "in_full": full}
        rows.append(row | {key: float(np.mean([each[key] for each in found])) for key in keys})
    return rows


def _distance(
    layer: TrainedLayer, decoder: TopKSoftmax, options: dict[str, Any], draws: int, at: int
) -> dict[str, float]:
    state = layer.asked[at * 97 % len(layer.asked)][None]
    logits = state.astype(np.float64) @ layer.weight.T.astype(np.float64) + layer.bias
    shares = shares_of(logits, Truncation(**options))[0]
    states = torch.from_numpy(state).expand(min(draws, 1000), -1)
    generator = torch.Generator().manual_seed(at)
    drawn = [decoder.sample(states, generator=generator, **options).numpy() for _ in range(-(-draws // len(states)))]
    seen = np.bincount(np.concatenate(drawn), minlength=len(shares))
    count = int(seen.sum())
    exact = np.random.default_rng(at).multinomial(count, shares)
    order = np.argsort(-shares)
    pools = np.unique(np.cumsum(shares[order]) * count // 8, return_inverse=True)[1]
    expected, got = (np.bincount(pools, weights=each[order]) for each in (count * shares, seen))
    chi, free = float(np.square(got - expected)[expected > 0] @ (1 / expected[expected > 0])), (expected > 0).sum() - 1
    return {
        "variation": float(np.abs(seen / count - shares).sum() / 2),
        "variation_of_exact_draws": float(np.abs(exact / count - shares).sum() / 2),
        "chi_square_a_degree": chi / max(1, int(free)),
        "words_left": float((shares > 0).sum()),
    }


@workload
@click.option("--words", type=int, help="Only the most frequent words of the layer; all 50,000 by default.")
@click.option("--rounds", default=60, show_default=True)
@click.option("--draws", default=20_000, show_default=True, help="Draws for each state that is compared.")
@click.option("--contexts", default=3, show_default=True, help="States that are compared.")
@torch.no_grad()
def main(words: int | None, rounds: int, draws: int, contexts: int) -> Outcome:
    """Compare draws with those from the full product."""
    layer = load_domains(DOMAINS, DOMAINS, words)
    head, decoder = decoder_of(layer)
    times = times_of(layer, head, decoder, rounds, (1, 8, 64))
    distances = distances_of(layer, decoder, draws, contexts)
    ours = [row for row in times if row["way"] in SAMPLERS]
    figures = [
        *figures_of(ours, [OVER_PRODUCT, OVER_SAMPLER], "speed-up {title}, {way}, batch {batch}, cold"),
        *figures_of(distances, [VARIATION], "{title}, {way}"),
    ]
    shown = [
        rows_table("CPU ms a batch, cold: after other work; means of rounds", times),
        rows_table(f"distribution of {draws:,} draws for each of {contexts} states", distances),
    ]
    record = Record(figures, [], scale=f"{len(layer.weight):,} words, one thread of a CPU")
    return Outcome(record, shown, {"times": times, "distances": distances})


if __name__ == "__main__":
    main()

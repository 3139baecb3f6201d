"""A trained language model on a text and in writing: perplexity with log Z estimated and bounded, greedy words, beams.

``python -m memhier.benchmarks.workloads.decode.perplexity`` reads the test text of Penn Treebank with a trained LSTM.
The truth is the full softmax in double precision. Every token's log-probability has to lie within its stated bounds,
and text written greedily has to be the model's own, word for word.
"""

import time
from dataclasses import replace
from itertools import islice
from typing import Any

import click
import numpy as np

from memhier.ann.decoder import LogitIndex
from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.decode.beams import beam_search
from memhier.benchmarks.workloads.decode.ptb import Floats, Ints, Lstm, read_tokens
from memhier.benchmarks.workloads.harness import Measure, Outcome, figures_of, rows_table, workload

__all__ = ["main"]

_BLOCK = 512
_START = 64


def exact_log_prob(model: Lstm, states: Floats, targets: Ints) -> Any:
    """Return float64 ``[n]`` by the full softmax."""
    found = []
    for start in range(0, len(states), _BLOCK):
        logits = states[start : start + _BLOCK].astype(np.float64) @ model.weight.T.astype(np.float64) + model.bias
        chosen = logits[np.arange(len(logits)), targets[start : start + _BLOCK]]
        found.append(chosen - np.logaddexp.reduce(logits, axis=1))
    return np.concatenate(found)


def measure_perplexity(model: Lstm, index: LogitIndex, tokens: int) -> dict[str, Any]:
    """Return perplexities, the error of the estimate, and the width and the misses of the bounds."""
    states, targets = model.read(read_tokens("test")[: tokens + 1])
    right = exact_log_prob(model, states, targets)
    started = time.perf_counter()
    found = index.log_prob(states, targets)
    seconds = time.perf_counter() - started
    full, ours = (float(np.exp(-each.mean())) for each in (right, found.estimate))
    return {
        "tokens": len(targets),
        "perplexity_full": full,
        "perplexity": ours,
        "relative_error": abs(ours / full - 1),
        "mean_error": float(np.abs(found.estimate - right).mean()),
        "largest_error": float(np.abs(found.estimate - right).max()),
        "mean_width": float((found.high - found.low).mean()),
        "outside_bounds": int(((right < found.low) | (right > found.high)).sum()),
        "seconds": seconds,
    }


def measure_greedy(model: Lstm, index: LogitIndex, words: int) -> dict[str, float]:
    """Write greedily by the full product and by certified answers; return how many words agree.

    Greedy text runs into a loop, so writing starts again from another word every 64.
    """
    same = proven = 0
    rng = np.random.default_rng(0)

    def full(hidden: Floats) -> int:
        return int((model.weight @ hidden[0] + model.bias).argmax())

    def ours(hidden: Floats) -> int:
        nonlocal proven
        found = index.topk(hidden, 1, certify=True, complete=True)
        proven += int(found.proven is not None and bool(found.proven[0]))
        return int(found.indices[0, 0])

    for _ in range(-(-words // _START)):
        first = int(rng.integers(len(model.weight)))
        pairs = zip(islice(model.write(first, full), _START), islice(model.write(first, ours), _START), strict=True)
        same += sum(one == other for one, other in pairs)
    count = -(-words // _START) * _START
    return {"words": count, "identical": same, "proven": proven / count}


def measure_beams(model: Lstm, index: LogitIndex, searches: int) -> dict[str, float]:
    """Search with beams over the full softmax and over the decoder's; compare texts and scores."""

    def full(states: Floats, k: int) -> tuple[Any, Ints]:
        logits = states.astype(np.float64) @ model.weight.T + model.bias
        best = np.argsort(-logits, 1)[:, :k]
        return np.take_along_axis(logits, best, 1) - np.logaddexp.reduce(logits, axis=1)[:, None], best

    def ours(states: Floats, k: int) -> tuple[Any, Ints]:
        found, z = index.distribution(states, k)
        return found.values.astype(np.float64) - z.estimate[:, None], found.indices

    same, apart, scored = 0, [], []
    for first in np.random.default_rng(1).integers(len(model.weight), size=searches).tolist():
        (right, score), (text, own) = (beam_search(model, first, ask) for ask in (full, ours))
        if right == text:
            same += 1
            apart.append(abs(own - score))
            states, _ = model.read(np.array([first, *text]))
            scored.append(abs(float(index.log_prob(states, text, exact=True).estimate.sum()) - score))
    return {
        "searches": searches, "identical": same, "score_error": max(apart, default=0.0),
        "score_error_rescored": max(scored, default=0.0),
    }  # fmt: skip


@workload
@click.option("--tokens", default=100_000, show_default=True, help="Of the test text, at most.")
@click.option("--greedy", default=10_000, show_default=True, help="Words to write greedily.")
@click.option("--beams", default=50, show_default=True, help="Beam searches of 20 words with 5 beams.")
def main(tokens: int, greedy: int, beams: int) -> Outcome:
    """Compare a language model's answers with the full softmax."""
    model = Lstm.load()
    learned, _ = model.read(read_tokens("valid")[:8001], sequences=8)
    rows = []
    for name, rank in (("preview", None), ("all directions", model.weight.shape[1])):
        index = LogitIndex.build(model.weight, model.bias, contexts=learned, k=10, method="preview", rank=rank)
        rows.append({"way": name} | measure_perplexity(model, index, tokens) | {"width": index.stats()["width"]})
    index = LogitIndex.build(model.weight, model.bias, contexts=learned, k=10, method="preview")
    written, searched = measure_greedy(model, index, greedy), measure_beams(model, index, beams)
    error = Measure("relative_error", "relative error of perplexity", "share")
    figures = [
        Figure.of("greedy words that are the model's own", written["identical"] / written["words"], "share", "more"),
        Figure.of("greedy words that were proven", written["proven"], "share", "more"),
        Figure.of("beam searches that end alike", searched["identical"] / searched["searches"], "share", "more"),
        Figure.of("largest error of a beam's score", searched["score_error"], "nats", "less"),
        Figure.of("the same, rescored exactly", searched["score_error_rescored"], "nats", "less"),
        *figures_of(rows[:1], [replace(error, paper="FGD")], "{title}, {way}"),
        *figures_of(rows[1:], [error], "{title}, {way}"),
        *figures_of(rows, [Measure("mean_width", "mean width of the bounds", "nats")], "{title}, {way}"),
    ]
    for row in rows:
        name = f"tokens outside their stated bounds, {row['way']}"
        figures.append(Figure.of(name, row["outside_bounds"], "tokens", "less", exact=True))
    scale = f"LSTM of 100 units, 10,000 words, {int(rows[0]['tokens']):,} tokens of Penn Treebank"
    shown = [rows_table("perplexity", rows)]
    return Outcome(Record(figures, scale=scale), shown, {"perplexity": rows, "greedy": written, "beams": searched})


if __name__ == "__main__":
    main()

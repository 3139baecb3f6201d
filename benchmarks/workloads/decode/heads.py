"""Output layers for beam search: log-probabilities of the likeliest words, by full products, decoders and rivals."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from memhier.ann.decoder import FGD, TopKSoftmax
from memhier.benchmarks.workloads.decode.translator.beams import Choose
from memhier.benchmarks.workloads.decode.translator.ways import Bounds, Ways

__all__ = ["Head", "adaptive_softmax", "full_layers", "graphs_of_faiss", "svd_softmax", "top_k_softmax"]

_EXACT = 256  # logits of an envelope


@dataclass(frozen=True, slots=True)
class Head:
    """One way from hidden states to the likeliest words.

    Attributes
    ----------
    name
        Its kind and setting.
    choose
        Maps hidden states ``[n, D]`` to log-probabilities float32 ``[n, K]`` and words int64 ``[n, K]``; or bounds of
        log Z, and log Z itself.
    memory
        DRAM held for it besides the layer, in bytes.
    build_s
        Seconds of processor time that its build took.
    """

    name: str
    choose: Choose | Ways
    memory: int = 0
    build_s: float = 0.0


def full_layers(layer: nn.Linear, k: int) -> Iterator[Head]:
    """Yield the full product in float32 and bfloat16."""
    yield Head("full, fp32", lambda states: _best(nn.functional.linear(states, layer.weight, layer.bias), k))
    weight, bias = layer.weight.detach().bfloat16(), layer.bias.detach().bfloat16()
    yield Head(
        "full, bf16", lambda states: _best(nn.functional.linear(states.bfloat16(), weight, bias).float(), k),
        memory=weight.nbytes,
    )  # fmt: skip


def top_k_softmax(layer: nn.Linear, k: int, contexts: Tensor) -> tuple[TopKSoftmax, list[Head]]:
    """Return memhier's decoder and its ways: proven words with proven bounds of log Z, an estimate, and none.

    The first has codes of all directions, in a decoder of its own, as its bounds are tens of times tighter. The last
    normalises over the K words found alone, as FGD's paper does.
    """
    started = time.process_time()
    decoder = TopKSoftmax.from_linear(layer, k=k, contexts=contexts)
    seconds = time.process_time() - started

    def estimated(states: Tensor) -> tuple[Tensor, Tensor]:
        found, z = decoder.index.distribution(states.numpy())
        values = torch.from_numpy(found.values - z.estimate[:, None]).float()
        return values, torch.from_numpy(found.indices)

    def alone(states: Tensor) -> tuple[Tensor, Tensor]:
        values, words = decoder.topk(states)
        return values.log_softmax(1), words

    ways: dict[str, Choose] = {"estimated log Z": estimated, f"the top {k} alone": alone}
    held = decoder.index.memory_bytes
    heads = [Head(f"TopKSoftmax, {name}", way, held, seconds) for name, way in ways.items()]
    return decoder, [_certified(layer, k, contexts), *heads]


def _certified(layer: nn.Linear, k: int, contexts: Tensor) -> Head:
    """Return the decoder that proves: an envelope gives the words and both bounds of log Z in one scan."""
    started = time.process_time()
    decoder = TopKSoftmax.from_linear(layer, k=k, contexts=contexts, rank=layer.in_features, method="preview")
    seconds = time.process_time() - started

    def bounds(states: Tensor) -> Bounds:
        found = decoder.index.envelope(states.numpy(), _EXACT)
        logits = torch.from_numpy(found.logits)
        values, places = torch.topk(logits, k)
        words = torch.from_numpy(found.rows).gather(1, places)
        low = logits.double().logsumexp(1)
        high = torch.logaddexp(low, torch.from_numpy(found.log_sum))
        open_ = torch.nonzero(values[:, -1] <= torch.from_numpy(found.cut))[:, 0]
        if len(open_):  # another word may be among the K
            every = layer(states[open_])
            values[open_], words[open_] = torch.topk(every, k)
            low[open_] = high[open_] = every.double().logsumexp(1)
        return values, words, low, high

    def exact(states: Tensor) -> Tensor:
        found: Tensor = layer(states).double().logsumexp(1)
        return found

    return Head("TopKSoftmax, certified log Z", Ways(bounds, exact), decoder.index.memory_bytes, seconds)


def graphs_of_faiss(layer: nn.Linear, k: int, efforts: tuple[int, ...]) -> Iterator[Head]:
    """Yield FGD as published: faiss's HNSW over the transformed rows, and a softmax over the K words found."""
    started = time.process_time()
    graph = FGD(layer.weight.detach().numpy(), layer.bias.detach().numpy())
    seconds = time.process_time() - started

    def choose(states: Tensor, effort: int) -> tuple[Tensor, Tensor]:
        found = graph.topk(states.numpy(), k, ef_search=effort)
        return torch.from_numpy(found.values).log_softmax(1), torch.from_numpy(found.indices)

    for effort in efforts:
        way = partial(choose, effort=effort)
        yield Head(f"FGD on faiss HNSW, efSearch {effort}", way, graph.memory_bytes, seconds)


def svd_softmax(layer: nn.Linear, k: int, rank: int, exact: int) -> Head:
    """Return SVD-softmax (Shim et al. 2017): leading directions for all words, exact logits of the best, Z of both."""
    started = time.process_time()
    weight, bias = layer.weight.detach(), layer.bias.detach()
    directions = _leading(weight, rank)
    projected = weight @ directions
    seconds = time.process_time() - started

    def choose(states: Tensor) -> tuple[Tensor, Tensor]:
        preview = nn.functional.linear(states @ directions, projected, bias)
        best = torch.topk(preview, exact, sorted=False).indices
        logits = torch.einsum("ncd,nd->nc", weight[best], states) + bias[best]
        z = preview.scatter_(1, best, logits).logsumexp(1, keepdim=True)
        values, places = torch.topk(logits, k)
        return values - z, best.gather(1, places)

    return Head(f"SVD-softmax, rank {rank}, {exact} exact", choose, projected.nbytes, seconds)


def adaptive_softmax(layer: nn.Linear, k: int, states: Tensor, words: Tensor, file: Path) -> Head:
    """Return adaptive softmax (Grave et al. 2017), which begins as the layer and learns from its hidden states.

    Parameters
    ----------
    layer
        Its words are in order of frequency.
    k
        How many words to return.
    states, words
        Hidden states ``[n, D]``, float32 or float16, and the words that followed, to learn from twice.
    file
        Keeps it for the next run.
    """
    total = layer.out_features
    head_words = max(k, total // 10)
    cutoffs = [head_words, max(head_words + 1, total // 2)]
    model = nn.AdaptiveLogSoftmaxWithLoss(layer.in_features, total, cutoffs, head_bias=True)
    if file.exists():
        kept = torch.load(file, weights_only=True)
        seconds: float = kept["seconds"]
        model.load_state_dict(kept["model"])
    else:
        started = time.process_time()
        _learn(model, layer, states, words)
        seconds = time.process_time() - started
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        torch.save({"model": model.state_dict(), "seconds": seconds}, part)
        part.replace(file)
    cutoffs = model.cutoffs

    def choose(asked: Tensor) -> tuple[Tensor, Tensor]:
        head = model.head(asked).log_softmax(1)
        values, found = torch.topk(head[:, : cutoffs[0]], k)
        for cluster, tail in enumerate(model.tail):
            share = head[:, cutoffs[0] + cluster]
            # No word of a cluster is likelier than the cluster.
            rows = torch.nonzero(share > values[:, -1])[:, 0]
            if len(rows):
                inside = tail(asked[rows]).log_softmax(1) + share[rows, None]
                both = torch.cat([values[rows], inside], 1)
                best, places = torch.topk(both, k)
                names = torch.arange(inside.shape[1]) + cutoffs[cluster]
                values[rows] = best
                found[rows] = torch.cat([found[rows], names.expand(len(rows), -1)], 1).gather(1, places)
        return values, found

    memory = sum(one.nbytes for one in model.parameters())
    return Head(f"adaptive softmax, {cutoffs[0]} words whole", choose, memory, seconds)


@torch.enable_grad()
def _learn(model: nn.AdaptiveLogSoftmaxWithLoss, layer: nn.Linear, states: Tensor, words: Tensor) -> None:
    weight, cutoffs = layer.weight.detach(), model.cutoffs
    model.head.weight.data[: cutoffs[0]] = weight[: cutoffs[0]]
    model.head.bias.data[: cutoffs[0]] = layer.bias.detach()[: cutoffs[0]]
    for tail, first, last in zip(model.tail, cutoffs, cutoffs[1:], strict=False):
        down, up = tail.children()
        directions = _leading(weight[first:last], len(next(down.parameters())))
        down.weight.data, up.weight.data = directions.T.contiguous(), weight[first:last] @ directions
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(0)
    for _ in range(2):
        for rows in torch.randperm(len(states), generator=random).split(1024):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            model(states[rows].float(), words[rows]).loss.backward()
            optimizer.step()


def _leading(weight: Tensor, rank: int) -> Tensor:
    """Return the leading directions ``[D, rank]`` of rows ``[V, D]``."""
    gram = weight.double().T @ weight.double()
    turned = np.linalg.eigh(gram.numpy())[1][:, ::-1][:, :rank]
    return torch.from_numpy(np.ascontiguousarray(turned, np.float32))


def _best(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, words = torch.topk(logits, k)
    return values - logits.logsumexp(1, keepdim=True), words

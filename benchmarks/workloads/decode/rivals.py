"""Other ways to the ten largest logits: full products of every type, and published approximations."""

import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor, nn

from memhier.ann.decoder.coding.transform import transform_contexts, transform_rows
from memhier.benchmarks.workloads.decode.clock import Floats, Ints, Way
from memhier.benchmarks.workloads.decode.kept import kept_index
from memhier.benchmarks.workloads.decode.layers import TrainedLayer

__all__ = ["approximations", "full_products", "graphs_of_faiss"]

K = 10


def full_products(layer: TrainedLayer) -> Iterator[Way]:
    """Yield the full product in float32, bfloat16 and int8 with dynamic activations."""
    weight, bias = torch.from_numpy(layer.weight), torch.from_numpy(layer.bias)
    yield Way("full", "fp32", lambda states: _topk(nn.functional.linear(torch.from_numpy(states), weight, bias)))
    half, half_bias = weight.bfloat16(), bias.bfloat16()
    yield Way(
        "full", "bf16",
        lambda states: _topk(nn.functional.linear(torch.from_numpy(states).bfloat16(), half, half_bias)),
        memory=half.nbytes,
    )  # fmt: skip
    linear = nn.Linear(*weight.shape[::-1])
    linear.weight.data, linear.bias.data = weight, bias
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is moving this to a package of its own
        quantize: Any = torch.ao.quantization.quantize_dynamic
        quantized = quantize(nn.Sequential(linear), {nn.Linear}, dtype=torch.qint8)
    yield Way(
        "full", "int8", lambda states: _topk(quantized(torch.from_numpy(states))), memory=layer.weight.nbytes // 4
    )


def approximations(layer: TrainedLayer) -> Iterator[Way]:
    """Yield SVD-softmax, adaptive softmax and inverted lists."""
    yield from _svd_softmax(layer)
    yield _adaptive_softmax(layer)
    rows = transform_rows(layer.weight, layer.bias)
    lists = len(rows) // 16

    def build() -> Any:
        index = faiss.index_factory(rows.shape[1], f"IVF{lists},Flat")
        index.cp.niter = 5
        index.train(rows[:: max(1, len(rows) // 25_000)])
        index.add(rows)
        return index

    index, seconds = kept_index(layer, f"IVF{lists},Flat on the transform, niter 5", build)

    def search(states: Floats, probes: int) -> Ints:
        parameters = faiss.SearchParametersIVF(nprobe=probes)
        found: Ints = index.search(transform_contexts(states), K, params=parameters)[1]
        return found

    for probes in (16, 64, 256):
        answer = partial(search, probes=probes)
        yield Way("IVF on the transform", f"{probes} of {lists} lists", answer, rows.nbytes, seconds)


def graphs_of_faiss(layer: TrainedLayer, construction: int) -> Iterator[Way]:
    """Yield FGD as published, and the same graph over plain inner products."""
    yield from _graph_of_faiss(
        layer,
        construction,
        "FGD as published",
        transform_rows(layer.weight, layer.bias),
        faiss.METRIC_L2,
        (50, 200, 400),
    )
    plain = np.concatenate([layer.weight, layer.bias[:, None]], 1)
    yield from _graph_of_faiss(
        layer, construction, "HNSW, plain inner product", plain, faiss.METRIC_INNER_PRODUCT, (200, 800)
    )


def _graph_of_faiss(
    layer: TrainedLayer, construction: int, family: str, rows: Floats, metric: int, efs: tuple[int, ...]
) -> Iterator[Way]:
    def build() -> Any:
        index = faiss.IndexHNSWFlat(rows.shape[1], 16, metric)
        index.hnsw.efConstruction = construction
        index.add(rows)
        return index

    index, seconds = kept_index(
        layer, f"HNSW16, metric {metric}, {rows.shape[1]}, efConstruction {construction}", build
    )

    def search(states: Floats, ef: int) -> Ints:
        # A context becomes (h, 1, 0) after the transform, (h, 1) before an inner product.
        contexts = transform_contexts(states)[:, : rows.shape[1]]
        parameters = faiss.SearchParametersHNSW(efSearch=ef)
        found: Ints = index.search(np.ascontiguousarray(contexts), K, params=parameters)[1]
        return found

    for ef in efs:
        held = rows.nbytes + 4 * index.hnsw.neighbors.size()
        yield Way(family, f"efSearch {ef}", partial(search, ef=ef), held, seconds)


def _svd_softmax(layer: TrainedLayer) -> Iterator[Way]:
    """SVD-softmax (Shim et al. 2017): leading singular directions of the weights, then exact logits of the best."""
    started = time.perf_counter()
    gram = layer.weight.T.astype(np.float64) @ layer.weight
    directions = np.linalg.eigh(gram)[1][:, ::-1].astype(np.float32)
    seconds = time.perf_counter() - started
    weight, bias = torch.from_numpy(layer.weight), torch.from_numpy(layer.bias)
    for rank, exact in ((32, 256), (64, 256), (128, 256)):
        turn = torch.from_numpy(np.ascontiguousarray(directions[:, :rank]))
        projected = weight @ turn

        def answer(states: Floats, turn: Tensor = turn, projected: Tensor = projected, exact: int = exact) -> Ints:
            hidden = torch.from_numpy(states)
            preview = nn.functional.linear(hidden @ turn, projected, bias)
            best = torch.topk(preview, exact, sorted=False).indices
            logits = torch.einsum("ncd,nd->nc", weight[best], hidden) + bias[best]
            return best.gather(1, torch.topk(logits, K).indices).numpy()

        yield Way("SVD low rank", f"rank {rank}, {exact} exact", answer, projected.nbytes, seconds)


def _adaptive_softmax(layer: TrainedLayer) -> Way:
    """Adaptive softmax (Grave et al. 2017): frequent words whole, others in fewer dimensions.

    Made from the trained layer, not trained: the tail's projection is the best of its rank. Words are in order of
    frequency.
    """
    started = time.perf_counter()
    head = min(4000, len(layer.weight) // 4)
    dimension = layer.weight.shape[1]
    weight, bias = torch.from_numpy(layer.weight), torch.from_numpy(layer.bias)
    tail = layer.weight[head:]
    directions = np.linalg.eigh(tail.T.astype(np.float64) @ tail)[1][:, ::-1][:, : dimension // 4].astype(np.float32)
    turn = torch.from_numpy(np.ascontiguousarray(directions))
    projected = weight[head:] @ turn
    seconds = time.perf_counter() - started

    def answer(states: Floats) -> Ints:
        hidden = torch.from_numpy(states)
        first = nn.functional.linear(hidden, weight[:head], bias[:head])
        rest = nn.functional.linear(hidden @ turn, projected, bias[head:])
        return _topk(torch.cat([first, rest], 1))

    return Way(
        "adaptive softmax", f"{head} words whole, the others in {dimension // 4}", answer, projected.nbytes, seconds
    )


def _topk(logits: Tensor) -> Ints:
    return torch.topk(logits, K).indices.numpy()

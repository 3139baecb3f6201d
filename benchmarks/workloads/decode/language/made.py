"""A made output layer of a language model's size, and hidden states for any layer. Neither is trained.

Rows: each belongs to a group of some 32 rows, which share three tenths of its variance, and norms spread log-normally
by a tenth. Hidden states: the direction of a word drawn by Zipf's law, with lesser shares of two others, and a common
part that belongs to one of 100 topics by half. One scale for all states gives the likeliest word a probability of a
half in the median, an assumption about a model's contexts. Two spectra are made:

- ``matched``: singular values of rows and variances of states in the layer's singular directions are those of the
  trained layer of 50,000 words by 512 in ``lm-softmax-50k``, stretched to the dimension.
- ``flat``: singular values fall as i^-0.25, variances of the common part as 1/i, and the words' directions stay as they
  are. Half of what tells words apart lies beyond the first quarter of the directions: harder than the trained layer.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from memhier.benchmarks.workloads.decode.clock import Floats, Ints

__all__ = ["SPECTRA", "made_contexts", "write_made_head"]

SPECTRA = ("matched", "flat")
# Of the trained layer, at the directions of these numbers: singular values and variances, relative to the first.
_AT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 400, 512)
_SINGULAR = (1.0, 0.6155, 0.4968, 0.3885, 0.3241, 0.3002, 0.2947, 0.2871, 0.275, 0.2622, 0.2478)
_VARIANCES = (1.0, 0.766, 0.417, 0.251, 0.0972, 0.0314, 0.00653, 0.00108, 0.00025, 0.00008, 0.00004)

_GROUP_ROWS, _SHARED = 32, 0.3
_ROWS_FALL, _CONTEXTS_FALL = 0.25, 1.0
_NORM_SPREAD = 0.1
_TOPICS, _TOPIC_SHARE = 100, 0.5
_PULLS = (1.0, 0.4, 0.25)  # of the words of a state
_BLOCK = 8192
_SAMPLE = 20_000  # rows that tell the singular directions
_MEDIAN = 0.5
_ASKED = 64  # states that tell the scale


def write_made_head(path: Path, words: int, dimension: int, dtype: torch.dtype, spectrum: str, seed: int = 0) -> None:
    """Write a made layer as the tensor ``lm_head.weight`` of a .safetensors file.

    Parameters
    ----------
    dtype
        Half precision; no copy in single precision is ever whole in memory.
    spectrum
        One of :data:`SPECTRA`.
    """
    rng = np.random.default_rng(seed)
    fall = _stretched(_SINGULAR, dimension) if spectrum == "matched" else _falling(_ROWS_FALL, dimension)
    turn = _rotation(rng, dimension)
    groups = rng.standard_normal((max(1, words // _GROUP_ROWS), dimension), np.float32)
    weight = torch.empty(words, dimension, dtype=dtype)
    for start in range(0, words, _BLOCK):
        count = min(_BLOCK, words - start)
        own = groups[rng.integers(0, len(groups), count)] * np.float32(_SHARED**0.5)
        own += np.float32((1 - _SHARED) ** 0.5) * rng.standard_normal((count, dimension), np.float32)
        rows = (own * fall) @ turn
        norms = np.exp(_NORM_SPREAD * rng.standard_normal((count, 1), np.float32))
        rows *= norms / np.linalg.norm(rows, axis=1, keepdims=True)
        weight[start : start + count] = torch.from_numpy(rows).to(dtype)
    save_file({"lm_head.weight": weight}, path)


def made_contexts(weight: Tensor, count: int, spectrum: str, seed: int = 1) -> Floats:
    """Return hidden states of a spectrum for a layer, float32 ``[count, D]``, in no order."""
    rng = np.random.default_rng(seed)
    words, dimension = weight.shape
    directions = _directions(weight, rng)
    spread = _falling(_CONTEXTS_FALL / 2, dimension)
    spread /= np.linalg.norm(spread)
    topics = rng.standard_normal((_TOPICS, dimension), np.float32)
    common = topics[rng.integers(0, _TOPICS, count)] * np.float32(_TOPIC_SHARE**0.5)
    common += np.float32((1 - _TOPIC_SHARE) ** 0.5) * rng.standard_normal((count, dimension), np.float32)
    states: Any = (common * spread) @ directions
    for pull in _PULLS:
        rows = weight[torch.from_numpy(_zipf(rng, words, count))].float().numpy()
        states += np.float32(pull) * rows / np.linalg.norm(rows, axis=1, keepdims=True)
    if spectrum == "matched":
        turned: Floats = states @ directions.T
        turned *= np.sqrt(_stretched(_VARIANCES, dimension)) / turned.std(0)
        states = turned @ directions
    return np.ascontiguousarray(states * np.float32(_scale(weight, states[:_ASKED])))


def _stretched(values: tuple[float, ...], dimension: int) -> Floats:
    """Return numbers that fall over all directions as measured ones do over 512."""
    places = np.arange(1, dimension + 1) * (_AT[-1] / dimension)
    found: Floats = np.exp(np.interp(np.log(places), np.log(_AT), np.log(values))).astype(np.float32)
    return found


def _falling(power: float, dimension: int) -> Floats:
    found: Floats = np.arange(1, dimension + 1, dtype=np.float32) ** np.float32(-power)
    return found


def _scale(weight: Tensor, states: Floats) -> float:
    """Return the factor that gives the likeliest word of these states the wanted probability in the median."""
    asked = torch.from_numpy(states)
    logits = torch.cat([asked @ weight[at : at + _BLOCK].float().T for at in range(0, len(weight), _BLOCK)], 1)
    low, high = 0.0, 1e6
    for _ in range(60):
        middle = (low + high) / 2
        likeliest = float((middle * logits).softmax(1).max(1).values.median())
        low, high = (middle, high) if likeliest < _MEDIAN else (low, middle)
    return high


def _directions(weight: Tensor, rng: Any) -> Floats:
    """Return the singular directions of a layer, ``[D, D]``, largest first, from some of its rows."""
    words, dimension = weight.shape
    some = torch.from_numpy(np.sort(rng.permutation(words)[:_SAMPLE]))
    gram = np.zeros((dimension, dimension), np.float32)
    for start in range(0, len(some), _BLOCK):
        rows = weight[some[start : start + _BLOCK]].float().numpy()
        gram += rows.T @ rows
    turned: Floats = np.ascontiguousarray(np.linalg.eigh(gram)[1].T[::-1])
    return turned


def _rotation(rng: Any, dimension: int) -> Floats:
    turned: Floats = np.linalg.qr(rng.standard_normal((dimension, dimension), np.float32))[0]
    return turned


def _zipf(rng: Any, words: int, count: int) -> Ints:
    shares = 1 / (np.arange(words) + 2.7)
    drawn: Ints = rng.choice(words, count, p=shares / shares.sum())
    return drawn

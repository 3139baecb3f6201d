"""Sets of items of many vectors, made of real data: words of sentences in their context, and patches of pictures.

- ``words``: sentences of the Brown corpus. A token is the CBOW vector of its word beside the mean of those three to
either
  side, as in late interaction, where a word's vector tells its context, turned to the leading axes.
- ``patches``: pictures of Fashion-MNIST. A token is a patch of 8 x 8 pixels, every 4 pixels, without those that are
blank.

All tokens have length one, as those of ColBERT.
"""

import zipfile
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.benchmarks.datasets import data_set_folder, load_images

__all__ = ["TOKEN_SETS", "TokenSet", "token_set"]

TOKEN_SETS = ("words", "patches")

_LONGEST = 128  # words of a sentence
_AROUND = 3
_SIDE, _STRIDE = 8, 4

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Items, and held-out ones as queries.

    Attributes
    ----------
    tokens
        float16 ``[t, d]``, of all items end to end.
    lengths
        int64 ``[n]``: tokens of each item.
    queries
        float32 ``[v, d]`` each, of at most 32 tokens.
    """

    tokens: npt.NDArray[np.float16]
    lengths: Ints
    queries: list[Floats]


def token_set(name: str, dimension: int, count: int, asked: int) -> TokenSet:
    """Return up to `count` items (0: all), and `asked` queries.

    Raises
    ------
    FileNotFoundError
        When a data set is missing.
    """
    made = _words if name == "words" else _patches
    tokens, lengths = made(dimension, 2 * (count + asked) if count else 1 << 30)
    tokens /= np.maximum(np.linalg.norm(tokens, axis=1, keepdims=True), np.float32(1e-12))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    order = np.random.default_rng(0).permutation(len(lengths))
    queries = [tokens[starts[row] : starts[row + 1]][:32] for row in order[:asked]]
    kept = np.sort(order[asked : asked + count] if count else order[asked:])
    rows = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in kept])
    return TokenSet(tokens[rows].astype(np.float16), lengths[kept], queries)


def _words(dimension: int, most: int) -> tuple[Floats, Ints]:
    folder = data_set_folder("ptb-rnnlm")
    vectors = np.load(folder / "ptb_cbow_100d.npz")["word_vecs"].astype(np.float32)
    places = {word: row for row, word in enumerate((folder / "vocab.txt").read_text().split("\n"))}
    sentences = list[Floats]()
    with zipfile.ZipFile(data_set_folder("brown") / "brown.zip") as archive:
        names = sorted(name for name in archive.namelist() if name[-2:].isdigit())
        for name in np.random.default_rng(1).permutation(names).tolist():
            if len(sentences) >= most:
                break
            for line in archive.read(name).decode("latin-1").split("\n"):
                words = [each.rsplit("/", 1)[0].lower() for each in line.split()]
                known = [places[word] for word in words if word in places][:_LONGEST]
                if known:
                    sentences.append(vectors[known])
    lengths = np.array([len(each) for each in sentences], np.int64)
    both = np.concatenate([np.hstack([each, _context(each)]) for each in sentences])
    both -= both.mean(axis=0)
    _, axes = np.linalg.eigh(both.T.astype(np.float64) @ both / len(both))
    return both @ axes[:, ::-1][:, :dimension].astype(np.float32), lengths


def _context(words: Floats) -> Floats:
    """Return the mean of the words around each word."""
    sums = np.concatenate([np.zeros((1, words.shape[1]), np.float32), np.cumsum(words, axis=0)])
    places = np.arange(len(words))
    low, high = np.maximum(places - _AROUND, 0), np.minimum(places + _AROUND + 1, len(words))
    around = sums[high] - sums[low] - words
    mean: Floats = around / np.maximum(high - low - 1, 1)[:, None].astype(np.float32)
    return mean


def _patches(dimension: int, most: int) -> tuple[Floats, Ints]:
    if dimension != _SIDE * _SIDE:
        raise ValueError(f"dimension={dimension}: patches have {_SIDE * _SIDE}")
    pictures = load_images("fashion-mnist").train
    some = np.random.default_rng(1).permutation(len(pictures))[:most]  # as they are sorted by class
    images = pictures[some].astype(np.float32) / 255
    views = np.lib.stride_tricks.sliding_window_view(images, (_SIDE, _SIDE), axis=(1, 2))[:, ::_STRIDE, ::_STRIDE]
    patches = views.reshape(len(images), -1, _SIDE * _SIDE)
    there = patches.max(axis=2) > 0.1
    there[:, 0] |= ~there.any(axis=1)
    return np.ascontiguousarray(patches[there]), there.sum(axis=1).astype(np.int64)

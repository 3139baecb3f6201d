"""Words, their weights, and their vectors from hashed character n-grams."""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.benchmarks.cli.demo.extract import Function

__all__ = ["hash_words", "ngrams", "split_words", "unit_rows", "weigh_fields", "weigh_function", "weigh_query"]

Floats: TypeAlias = npt.NDArray[np.float32]

NGRAM_LENGTHS = (3, 4, 5)
HASHES = 8  # coordinates that one n-gram is added to or taken from
HASHED_WORDS = 4096  # at a time
WORD_CHARS_MAX = 24  # longer ones are encoded data, not words

# How much a word counts in each part of a function. Chosen on 3,000 queries drawn with another seed.
# The names of the package, the module and the class count less than the function's own: they are shared by many.
FIELD_WEIGHTS: Mapping[str, float] = {
    "name": 10.0, "qualifier": 2.0, "signature": 2.0, "documentation": 1.0, "code": 0.5,
}  # fmt: skip

# camelCase, HTTPServer and snake_case fall into their words; a run with letters beyond ASCII is one word.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_RUN = re.compile(r"[^\W\d_]+|\d+")


def split_words(text: str) -> list[str]:
    """Return the words of code or prose, in lower case and in order.

    Examples
    --------
    >>> split_words("HTTPServer.parse_date(isoString, 3)")
    ['http', 'server', 'parse', 'date', 'iso', 'string', '3']
    """
    if text.isascii():
        return [word.lower()[:WORD_CHARS_MAX] for word in _WORD.findall(text)]
    runs = [_WORD.findall(run) if run.isascii() else [run] for run in _RUN.findall(text)]
    return [word.lower()[:WORD_CHARS_MAX] for words in runs for word in words]


def weigh_fields(fields: Mapping[str, str]) -> dict[str, float]:
    """Return the weight of each word: the square root of its counts, each times the weight of its field."""
    counts: dict[str, float] = {}
    for field, text in fields.items():
        weight = FIELD_WEIGHTS[field]
        for word in split_words(text):
            counts[word] = counts.get(word, 0.0) + weight
    return {word: math.sqrt(count) for word, count in counts.items()}


def weigh_function(function: Function) -> dict[str, float]:
    """Return the weight of each word of a function; its held-out sentence has no part in it."""
    qualifier, _, name = function.name.rpartition(".")
    return weigh_fields({
        "name": name,
        "qualifier": qualifier,
        "signature": function.signature,
        "documentation": function.documentation,
        "code": function.code,
    })  # fmt: skip


def weigh_query(text: str) -> dict[str, float]:
    """Return the weight of each word of a query in plain words."""
    return weigh_fields({"documentation": text})


def ngrams(word: str) -> list[str]:
    """Return the character n-grams of a word between its boundaries, and the whole of it.

    Examples
    --------
    >>> ngrams("date")
    ['<da', 'dat', 'ate', 'te>', '<dat', 'date', 'ate>', '<date', 'date>', '<date>']
    """
    bounded = f"<{word}>"
    size = len(bounded)
    grams = [bounded[i : i + n] for n in NGRAM_LENGTHS for i in range(size - n + 1)]
    return grams if size in NGRAM_LENGTHS else [*grams, bounded]


def hash_words(words: Sequence[str], dimension: int, seed: int) -> Floats:
    """Return one unit vector per word: a sparse random projection of its n-grams.

    Each n-gram is added to or taken from 8 coordinates that a hash of it chooses, so words that share n-grams have
    similar vectors and no table of n-grams is kept. The vector of a word depends on nothing but the word, the
    dimension and the seed.

    Parameters
    ----------
    words
        Any words, seen before or not.
    dimension
        Width of the vectors, at most 32,768.
    seed
        Any integer from 0 to 2**64 - 1.

    Returns
    -------
    numpy.ndarray
        float32 ``[len(words), dimension]``.
    """
    vectors = np.empty((len(words), dimension), np.float32)
    for start in range(0, len(words), HASHED_WORDS):
        vectors[start : start + HASHED_WORDS] = _hash_block(words[start : start + HASHED_WORDS], dimension, seed)
    return unit_rows(vectors)


def unit_rows(matrix: Floats) -> Floats:
    """Return each row at unit length; a row of zeros stays as it is."""
    lengths = np.linalg.norm(matrix, axis=1, keepdims=True).astype(np.float32)
    lengths[lengths == 0] = 1
    unit: Floats = matrix / lengths
    return unit


def _hash_block(words: Sequence[str], dimension: int, seed: int) -> Floats:
    grams = [ngrams(word) for word in words]
    hashed = np.frombuffer(b"".join(_hashes(grams, seed)), "<u2").astype(np.int64)
    rows = np.repeat(np.arange(len(words)), [len(own) * HASHES for own in grams])
    signs = np.where(hashed >> 15, 1.0, -1.0)
    cells = rows * dimension + (hashed & 0x7FFF) % dimension
    sums = np.bincount(cells, weights=signs, minlength=len(words) * dimension)
    return sums.astype(np.float32).reshape(len(words), dimension)


def _hashes(grams: Iterable[Sequence[str]], seed: int) -> Iterable[bytes]:
    keyed = hashlib.blake2b(key=seed.to_bytes(8, "little"), digest_size=2 * HASHES)
    for own in grams:
        for gram in own:
            state = keyed.copy()
            state.update(gram.encode())
            yield state.digest()

"""From weighted words to 256 dimensions: a truncated SVD taken through a random sketch.

A word is its hashed n-grams (512 dimensions, a sparse random projection) times its inverse document frequency; a
function is the weighted sum of its words, at unit length. The second moment of a sample of functions is 512 x 512
whatever their number, and its leading eigenvectors are the right singular vectors of the sketched matrix: the truncated
SVD of Halko, Martinsson and Tropp (arXiv 0909.4061) with one pass over the data. Nothing else grows with the corpus
but the vectors of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.benchmarks.cli.demo.corpus import Corpus, Words
from memhier.benchmarks.cli.demo.text import hash_words, unit_rows, weigh_query

__all__ = ["DIMENSION", "Projection"]

Floats: TypeAlias = npt.NDArray[np.float32]

DIMENSION = 256
SKETCH = 512  # a wider sketch found no more of the functions, see FIELD_WEIGHTS
FREQUENCY_POWER = 0.7  # of the inverse document frequency
SAMPLE = 16384  # functions that the directions are taken from
BLOCK = 1024  # functions at a time


class Projection:
    """Maps words and their weights to vectors of unit length.

    Make one with :meth:`fit` or :meth:`load`.
    """

    def __init__(self, vocabulary: list[str], frequency: Floats, unseen: float, basis: Floats, seed: int) -> None:
        self._frequency = dict(zip(vocabulary, frequency.tolist(), strict=True))
        self._unseen = unseen
        self._basis = basis
        self._seed = seed

    @classmethod
    def fit(cls, corpus: Corpus, seed: int = 0) -> Self:
        """Find the 256 directions in which the functions of a corpus differ most.

        Equal corpus and seed give an equal projection on the same machine.
        """
        rarity = np.log((len(corpus) + 1) / (corpus.standing_in + 0.5)) ** FREQUENCY_POWER
        unseen = float(np.log((len(corpus) + 1) / 0.5) ** FREQUENCY_POWER)
        frequency = rarity.astype(np.float32)
        sketched = hash_words(corpus.vocabulary, SKETCH, seed) * frequency[:, None]
        generator = np.random.default_rng(seed)
        rows = np.sort(generator.permutation(len(corpus))[:SAMPLE])
        moment = np.zeros((SKETCH, SKETCH))
        for start in range(0, len(rows), BLOCK):
            block = _sum_words(sketched, corpus.words(rows[start : start + BLOCK]))
            moment += block.T @ block
        _, directions = np.linalg.eigh(moment)
        basis = np.ascontiguousarray(directions[:, ::-1][:, :DIMENSION], dtype=np.float32)
        return cls(corpus.vocabulary, frequency, unseen, basis, seed)

    def vectors(self, corpus: Corpus, block: int = BLOCK) -> Iterator[Floats]:
        """Yield the vectors of a corpus, float32 ``[block, 256]``, in order; the block changes nothing in them."""
        projected = self._word_vectors(corpus.vocabulary)
        for start in range(0, len(corpus), block):
            yield _sum_words(projected, corpus.words(np.arange(start, min(start + block, len(corpus)))))

    def queries(self, texts: Sequence[str]) -> Floats:
        """Return the vectors of texts in plain words, float32 ``[len(texts), 256]``.

        Raises
        ------
        ValueError
            When a text holds no word.
        """
        weights = [weigh_query(text) for text in texts]
        for text, own in zip(texts, weights, strict=True):
            if not own:
                raise ValueError(
                    f"query {text!r} holds no word: say what the function does, such as 'parse a date from text'"
                )
        vocabulary = {word: number for number, word in enumerate(sorted({word for own in weights for word in own}))}
        words = Words(
            np.concatenate([[0], np.cumsum([len(own) for own in weights])]).astype(np.int64),
            np.array([vocabulary[word] for own in weights for word in own], np.int32),
            np.array([weight for own in weights for weight in own.values()], np.float32),
        )
        return _sum_words(self._word_vectors(list(vocabulary)), words)

    def save(self, path: Path) -> None:
        """Write the projection to one ``.npz`` file."""
        np.savez(
            path,
            vocabulary=np.array("\n".join(self._frequency)),
            frequency=np.array(list(self._frequency.values()), np.float32),
            unseen=self._unseen,
            basis=self._basis,
            seed=self._seed,
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a projection that :meth:`save` wrote."""
        with np.load(path) as file:
            words = str(file["vocabulary"]).split("\n")
            return cls(words, file["frequency"], float(file["unseen"]), file["basis"], int(file["seed"]))

    def _word_vectors(self, words: list[str]) -> Floats:
        frequency = np.array([self._frequency.get(word, self._unseen) for word in words], np.float32)
        # In blocks: the sketch of a whole vocabulary is twice the size of the projected vectors.
        blocks = range(0, len(words), 4096)
        vectors = [hash_words(words[i : i + 4096], SKETCH, self._seed) @ self._basis for i in blocks]
        projected: Floats = np.concatenate(vectors) * frequency[:, None]
        return projected


def _sum_words(word_vectors: Floats, words: Words) -> Floats:
    """Return the weighted sum of each function's words, at unit length."""
    sums = np.empty((len(words.starts) - 1, word_vectors.shape[1]), np.float32)
    # One function at a time: the words of one fit in cache, which a whole block (`np.add.reduceat`, five times the
    # time) does not, and the sum of one function cannot depend on which others stand in its block.
    for row, (start, stop) in enumerate(pairwise(words.starts.tolist())):
        np.matmul(words.weights[start:stop], word_vectors[words.numbers[start:stop]], out=sums[row])
    return unit_rows(sums)

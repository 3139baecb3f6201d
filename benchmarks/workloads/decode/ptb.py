"""A trained word-level LSTM on Penn Treebank, run in NumPy: its layer, its hidden states on a text, its own writing."""

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.benchmarks.datasets import data_set_folder
from memhier.io.outside import reading

__all__ = ["Lstm", "read_tokens"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lstm:
    """One layer, and the softmax over 10,000 words.

    Attributes
    ----------
    embed
        float32 ``[V, D]``.
    input_gates, state_gates, gate_bias
        float32 ``[D, 4 D]``, ``[D, 4 D]``, ``[4 D]``; gates in the order forget, candidate, input, output.
    weight, bias
        float32 ``[V, D]`` and ``[V]``: the output layer.
    """

    embed: Floats
    input_gates: Floats
    state_gates: Floats
    gate_bias: Floats
    weight: Floats
    bias: Floats

    @classmethod
    def load(cls) -> Self:
        """Read the trained numbers."""
        path = data_set_folder("ptb-rnnlm") / "rnnlm_ptb_h100.npz"
        with reading(path):
            raw: Any = np.load(path)
            numbers = {name: raw[name].astype(np.float32) for name in raw.files}
            return cls(
                numbers["embed"], numbers["lstm_Wx"], numbers["lstm_Wh"], numbers["lstm_b"],
                np.ascontiguousarray(numbers["softmax_W"].T), numbers["softmax_b"],
            )  # fmt: skip

    def step(self, words: Ints, hidden: Floats, cell: Floats) -> tuple[Floats, Floats]:
        """Read one word of each sequence; return hidden states and cells ``[n, D]``."""
        gates = self.embed[words] @ self.input_gates + hidden @ self.state_gates + self.gate_bias
        forget, candidate, put, out = np.split(gates, 4, axis=1)
        cell = _sigmoid(forget) * cell + _sigmoid(put) * np.tanh(candidate)
        return _sigmoid(out) * np.tanh(cell), cell

    def read(self, tokens: Ints, sequences: int = 1) -> tuple[Floats, Ints]:
        """Return hidden states over a text ``[n, D]``, and the word that follows each.

        Parameters
        ----------
        sequences
            Pieces that the text is cut into and that are read beside each other, each from an empty state.
        """
        length = (len(tokens) - 1) // sequences
        pieces = tokens[: sequences * length].reshape(sequences, length)
        hidden = cell = np.zeros((sequences, self.embed.shape[1]), np.float32)
        states = np.empty((sequences, length, self.embed.shape[1]), np.float32)
        for at in range(length):
            hidden, cell = self.step(pieces[:, at], hidden, cell)
            states[:, at] = hidden
        targets = tokens[1 : sequences * length + 1]
        return states.reshape(-1, states.shape[2]), targets

    def write(self, first: int, choose: Callable[[Floats], int]) -> Iterator[int]:
        """Yield words without end, each chosen by the hidden state ``[1, D]`` after the one before."""
        hidden = cell = np.zeros((1, self.embed.shape[1]), np.float32)
        word = first
        while True:
            hidden, cell = self.step(np.array([word]), hidden, cell)
            word = choose(hidden)
            yield word


def read_tokens(part: str) -> Ints:
    """Return the words of ``train``, ``valid`` or ``test`` as numbers of the model's vocabulary."""
    vocabulary, path = data_set_folder("ptb-rnnlm") / "vocab.txt", data_set_folder("ptb") / "ptb.zip"
    with reading(vocabulary):
        number = {name: i for i, name in enumerate(vocabulary.read_text().split("\n"))}
    with reading(path), zipfile.ZipFile(path) as file:
        text = file.read(f"ptb.{part}.txt").decode()
        return np.array([number[word] for word in text.replace("\n", "<eos>").strip().split()], np.int64)


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-values)), np.float32)

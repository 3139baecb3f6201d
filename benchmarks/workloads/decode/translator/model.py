"""A translator: a bidirectional GRU reads, a GRU with attention (Luong et al. 2015) writes."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Read", "Translator"]


class Read(NamedTuple):
    """A batch of sentences of one length as the encoder leaves them.

    Attributes
    ----------
    memory, keys
        float32 ``[n, length, D]``: the encoder's states, and the same as attention compares them.
    first
        float32 ``[n, D]``: the first state of the decoder.
    """

    memory: Tensor
    keys: Tensor
    first: Tensor

    def rows(self, rows: Tensor) -> "Read":
        """Return some of the sentences, in a new order."""
        return Read(self.memory[rows], self.keys[rows], self.first[rows])


class Translator(nn.Module):
    """Words to words; `output` is the layer that a decoder takes the place of.

    Parameters
    ----------
    source, target
        Words of both vocabularies.
    width
        Dimension of all embeddings and states, D.
    dropout
        Share of the numbers that training drops.
    """

    def __init__(self, source: int, target: int, width: int, dropout: float) -> None:
        super().__init__()
        self.source: nn.Embedding = nn.Embedding(source, width, sparse=True)
        self.target: nn.Embedding = nn.Embedding(target, width, sparse=True)
        self.encoder: nn.GRU = nn.GRU(width, width // 2, bidirectional=True, batch_first=True)
        self.bridge: nn.Linear = nn.Linear(width, width)
        self.decoder: nn.GRU = nn.GRU(width, width, batch_first=True)
        self.attention: nn.Linear = nn.Linear(width, width, bias=False)
        self.join: nn.Linear = nn.Linear(2 * width, width)
        self.output: nn.Linear = nn.Linear(width, target)
        self.drop: nn.Dropout = nn.Dropout(dropout)
        for table in (self.source, self.target):
            nn.init.normal_(table.weight, std=0.1)
        self.output.weight = self.target.weight  # tied: a small corpus tells too little of rare words for two tables
        nn.init.zeros_(self.output.bias)

    def read(self, words: Tensor) -> Read:
        """Encode sentences of one length, int64 ``[n, length]``."""
        memory, last = self.encoder(self.drop(self.source(words)))
        memory = self.drop(memory)
        first = torch.tanh(self.bridge(torch.cat([last[0], last[1]], 1)))
        return Read(memory, self.attention(memory), first)

    def forward(self, read: Read, words: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return what the output layer takes after each word, and the state after the last.

        Parameters
        ----------
        read
            The sentences to translate.
        words
            int64 ``[n, length]``: words written so far, or the last one alone with the state before it.
        state
            float32 ``[n, D]``; the first state of `read` if None.
        """
        before = read.first if state is None else state
        states, last = self.decoder(self.drop(self.target(words)), before[None].contiguous())
        weights = torch.softmax(states @ read.keys.transpose(1, 2), 2)
        hidden = torch.tanh(self.join(torch.cat([weights @ read.memory, states], 2)))
        return self.drop(hidden), last[0]

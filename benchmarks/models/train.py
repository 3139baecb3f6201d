"""Language models trained within minutes on a CPU: an LSTM, and a transformer in the shape of GPT-2.

A softmax over 50,000 words would take nearly all of the time, so training samples words to hold against the right one,
by their frequency, and corrects their logits for it (Jean et al. 2015).
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

__all__ = ["LstmModel", "gpt_model", "train"]

Ints: TypeAlias = npt.NDArray[np.int64]

_BATCH, _LENGTH = 16, 24
_SAMPLED = 2048


class LstmModel(nn.Module):
    """Embeddings, one LSTM layer, and an output layer with bias.

    Parameters
    ----------
    words, dimension
        Of the vocabulary and of hidden states.
    """

    def __init__(self, words: int, dimension: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, dimension, sparse=True)
        self.lstm = nn.LSTM(dimension, dimension, batch_first=True)
        self.head = nn.Linear(dimension, words)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return hidden states ``[n, t, D]``, and the state to go on from."""
        hidden, state = self.lstm(self.embed(tokens), state)
        return hidden, state


def gpt_model(words: int, dimension: int = 256, layers: int = 4) -> Any:
    """Return an untrained GPT-2 of transformers with a head of its own."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=words, n_positions=256, n_embd=dimension, n_layer=layers, n_head=dimension // 64,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.wte.sparse = True
    return model


def train(model: Any, tokens: Ints, words: int, steps: int, seed: int = 0) -> list[float]:
    """Train for some steps; return the loss of each, over the sampled words."""
    torch.manual_seed(seed)
    # What autograd makes is right, and torch asks to be told so.
    invariants: Any = torch.sparse.check_sparse_tensor_invariants
    invariants.disable()
    rng = np.random.default_rng(seed)
    # Words that only occur elsewhere count as seen once.
    counts = np.maximum(1, np.bincount(tokens, minlength=words)).astype(np.float64) ** 0.75
    shares = counts / counts.sum()
    correction = torch.from_numpy(np.log(shares * _SAMPLED)).float()
    head = model.head if isinstance(model, LstmModel) else model.lm_head
    embed = model.embed if isinstance(model, LstmModel) else model.transformer.wte
    # Only rows that a step touched are updated.
    wide = [embed.weight, head.weight]
    dense = [each for each in model.parameters() if all(each is not other for other in wide)]
    rate = 0.1 if isinstance(model, LstmModel) else 0.01  # hidden states of the GPT are some ten times longer
    optimizers = [torch.optim.Adagrad(wide, lr=rate), torch.optim.AdamW(dense, lr=1e-3)]
    losses = []
    model.train()
    for _ in range(steps):
        starts = rng.integers(0, len(tokens) - _LENGTH - 1, _BATCH)
        pieces = torch.from_numpy(np.stack([tokens[at : at + _LENGTH + 1] for at in starts]))
        hidden = model(pieces[:, :-1])[0] if isinstance(model, LstmModel) else model.transformer(pieces[:, :-1])[0]
        sampled = torch.from_numpy(rng.choice(words, _SAMPLED, p=shares))
        loss = _sampled_loss(hidden.reshape(-1, hidden.shape[-1]), pieces[:, 1:].reshape(-1), head, sampled, correction)
        model.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(dense, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


def _sampled_loss(hidden: Tensor, targets: Tensor, head: nn.Linear, sampled: Tensor, correction: Tensor) -> Tensor:
    rows = torch.cat([targets, sampled])
    weight = nn.functional.embedding(rows, head.weight, sparse=True)
    bias = -correction[rows] if head.bias is None else head.bias[rows] - correction[rows]
    count = len(targets)
    right = (hidden * weight[:count]).sum(1) + bias[:count]
    others = hidden @ weight[count:].T + bias[count:]
    # The right word among the sampled would be held against itself.
    others = others.masked_fill(targets[:, None] == sampled[None], -1e9)
    return (torch.logsumexp(torch.cat([right[:, None], others], 1), 1) - right).mean()

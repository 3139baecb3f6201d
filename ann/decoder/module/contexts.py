"""The hidden states that reach a model's output layer while it reads or writes, and its change to the logits."""

from typing import Any

import torch
from torch import Tensor, nn

from memhier.ann.decoder.module.outcome import Change, Outcome, change_of, outcome_of

__all__ = ["ContextSample", "read_contexts"]

_SEQUENCES, _LENGTH, _PROMPT = 32, 96, 4
_CONTEXTS_MOST = 8192
_CONTEXTS_GOOD = 2048  # written by a model with an encoder, if its text allows


@torch.no_grad()
def read_contexts(
    model: Any, head: nn.Linear, input_ids: Tensor | None, seed: int
) -> tuple[Tensor, Outcome, Change | None]:
    """Return the hidden states of a model that reads or writes a text, float32 ``[n, D]``, and its change to logits.

    The change comes by its kind, and as a formula if it is known.

    Raises
    ------
    TypeError
        If the model does not call the layer, or does not read words.
    """
    seen, last = ContextSample(_CONTEXTS_MOST, seed), dict[str, Tensor]()
    hooks = (
        head.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].reshape(-1, inputs[0].shape[-1]))),
        head.register_forward_hook(lambda _, inputs, logits: last.update(hidden=inputs[0], logits=logits)),
    )
    training = [module.training for module in model.modules()]
    model.eval()
    try:
        texts = _prompts(head.weight.shape[0], seed) if input_ids is None else input_ids
        if input_ids is None or _has_encoder(model):
            _write(model, texts, seed, written=input_ids is not None)
        else:
            for row in input_ids:
                model(row[None])
        outcome, change = _change(model, texts[:1], last)
        if not _is_product(head, last["hidden"], last["logits"]):
            outcome, change = "other", None
    finally:
        for hook in hooks:
            hook.remove()
        # One by one: parts may be frozen in a mode of their own.
        for module, mode in zip(model.modules(), training, strict=True):
            module.training = mode
    return seen.states().float(), outcome, change


def _change(model: Any, text: Tensor, last: dict[str, Tensor]) -> tuple[Outcome, Change | None]:
    last.clear()
    output = model(input_ids=text, decoder_input_ids=text[:, :_PROMPT]) if _has_encoder(model) else model(text)
    if not last:
        raise TypeError(f"model: {type(model).__name__} does not call its output layer; it cannot be replaced")
    return outcome_of(last["logits"], output), change_of(getattr(model, "config", None), last["logits"], output)


def _is_product(head: nn.Linear, hidden: Tensor, logits: Tensor) -> bool:
    """Say if the layer computes the product of its weights alone: a hook, or a class made of Linear, may do more."""
    product, near = nn.functional.linear(hidden, head.weight, head.bias), 1e-2 if logits.element_size() == 2 else 1e-5
    return product.shape == logits.shape and torch.allclose(product, logits, near, near * float(logits.abs().max()))


def _has_encoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)) and hasattr(model, "generate")


def _prompts(words: int, seed: int) -> Tensor:
    return torch.randint(words, (_SEQUENCES, _PROMPT), generator=torch.Generator().manual_seed(seed))


def _write(model: Any, texts: Tensor, seed: int, *, written: bool) -> None:
    """Let the model write from random prompts, or from texts that its encoder reads."""
    longest = getattr(model.config, "max_position_embeddings", None) or _LENGTH
    length = min(_LENGTH, longest)
    if written:
        # Of each text enough words that all together make enough contexts, and at least 16.
        length = min(length, max(16, -(-_CONTEXTS_GOOD // len(texts))))
    rows = texts[: max(1, -(-_CONTEXTS_MOST // length))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for some in torch.split(rows, _SEQUENCES):
            model.generate(
                some, attention_mask=torch.ones_like(some), do_sample=True, top_k=0, eos_token_id=None,
                max_length=length, pad_token_id=0,
            )  # fmt: skip


class ContextSample:
    """A sample of rows that come in blocks: the rows with the smallest random keys, in their order of arrival."""

    def __init__(self, most: int, seed: int) -> None:
        self._most, self._generator = most, torch.Generator().manual_seed(seed)
        self._rows: list[Tensor] = []
        self._keys = torch.empty(0, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """Add a block of rows."""
        keys = torch.rand(len(rows), dtype=torch.float64, generator=self._generator)
        self._keys = torch.cat([self._keys, keys])
        self._rows.append(rows)
        if len(self._keys) > 2 * self._most:
            self.states()

    def states(self) -> Tensor:
        """Return the sample."""
        rows = torch.cat(self._rows)
        if len(rows) > self._most:
            kept = torch.topk(self._keys, self._most, largest=False).indices.sort().values
            rows, self._keys = rows[kept], self._keys[kept]
        self._rows = [rows]
        return rows

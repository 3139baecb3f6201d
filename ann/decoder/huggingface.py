"""The decoder in a model of transformers: ``generate`` goes on as before, without the full product.

The output layer is replaced by one that computes the largest logits exactly and gives all other words an equal share of
what is left of the partition function. Softmax, beam scores, top-p and logits processors then see probabilities among
all words. Where ``generate`` needs no more than which words are largest, these alone are looked for, the fastest way.
:func:`undo` puts the layer back.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from memhier.ann.decoder.build import CONTEXTS_LEAST
from memhier.ann.decoder.calibrate import measure_choices
from memhier.ann.decoder.decoder import TopKSoftmax
from memhier.ann.decoder.generation import needs_ranks_alone, ranks_alone, ranks_are_enough
from memhier.ann.decoder.settings import Method, way_for

__all__ = ["AcceleratedHead", "accelerate", "rescore", "undo"]

Model = TypeVar("Model", bound=nn.Module)

_SEQUENCES, _LENGTH, _PROMPT = 32, 96, 4
_CONTEXTS_MOST = 8192


class AcceleratedHead(nn.Module):
    """Stands in for an output layer while nothing is trained.

    Parameters
    ----------
    head
        The layer; it goes on to compute whatever needs gradients.
    decoder
        Of the layer, with ``output="filled"``.
    certify
        Whether the likeliest word is proven, and computed by the layer itself where it is not.
    choices
        ``(batch, way)`` in ascending order: whether log Z comes faster from a scan, or ``"full"``.
    """

    head: nn.Linear

    def __init__(
        self,
        head: nn.Linear,
        decoder: TopKSoftmax,
        certify: bool = False,
        choices: tuple[tuple[int, str], ...] = ((1, "preview"),),
    ) -> None:
        super().__init__()
        self.__dict__["head"] = head
        # The layer's own parameters under their own names: a state dict stays what it was, and what it puts in the
        # place of one is in its place in the layer, too.
        self._parameters = head._parameters
        self.decoder, self.certify, self.choices = decoder, certify, choices
        self._seen = _state_of(head)
        self.calls = self.rows = self.completed = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., V]``; while ranks are enough, the least number for all but the k largest."""
        if self.training or (torch.is_grad_enabled() and (hidden.requires_grad or self.head.weight.requires_grad)):
            full: Tensor = self.head(hidden)
            return full
        self.calls += 1
        rows = hidden.numel() // hidden.shape[-1]
        self.rows += rows
        ranks = ranks_are_enough(self)
        if (self.decoder.index.way(rows) if ranks else way_for(self.choices, rows)) == "full":
            full = self.head(hidden)
            return full
        state = _state_of(self.head)
        if self._seen != state:  # trained on, loaded anew, or moved
            self.decoder.refresh(self.head)
            self._seen = state
        logits = self._ranked(hidden) if ranks else self.decoder(hidden)
        return self._certified(hidden, logits) if self.certify else logits

    def _ranked(self, hidden: Tensor) -> Tensor:
        values, indices = self.decoder.topk(hidden)
        least = torch.finfo(hidden.dtype).min
        logits = torch.full((*hidden.shape[:-1], self.head.weight.shape[0]), least, dtype=hidden.dtype)
        return logits.scatter_(-1, indices, values.to(hidden.dtype))

    def _certified(self, hidden: Tensor, logits: Tensor) -> Tensor:
        states = hidden.detach().reshape(-1, hidden.shape[-1])
        found = self.decoder.index.topk(states.float().numpy(), 1, certify=True)
        assert found.proven is not None
        flat = logits.reshape(-1, logits.shape[-1])
        # What is proven may be missing among the largest estimates that `logits` were made from.
        likeliest = flat.argmax(-1).numpy()
        doubtful = torch.from_numpy(np.flatnonzero(~found.proven | (likeliest != found.indices[:, 0])))
        if len(doubtful):
            self.completed += len(doubtful)
            flat[doubtful] = self.head(states[doubtful]).to(flat.dtype)
        return flat.reshape(logits.shape)


def accelerate(
    model: Model,
    *,
    k: int = 64,
    input_ids: Tensor | None = None,
    precision: float = 0.99,
    method: Method = "auto",
    certify: bool = False,
    seed: int = 0,
    progress: bool = False,
) -> Model:
    """Replace the output layer of a causal language model on the CPU, in place.

    Parameters
    ----------
    model
        Of transformers, or anything else with ``get_output_embeddings`` and ``set_output_embeddings``.
    k
        Largest logits that are exact; at least what a sampler draws from (``top_k``), and more where logits
        processors rule words out.
    input_ids
        int64 ``[n, t]``: text whose hidden states teach the decoder, such as a few thousand words of what will be
        written. When not given, the model writes some itself, from random prompts.
    precision, method
        As for :meth:`LogitIndex.build`. They hold where ranks are enough: in ``generate``, greedily or with a `top_k`
        of at most `k`, and nothing that looks at scores; a streamer or criterion that calls this same model meanwhile
        sees these ranks, too. What needs log Z (beams, top-p alone, plain calls of the model) takes a scan of all
        codes, or the full product where that is faster.
    certify
        Prove the likeliest word of every step, and compute those that cannot be proven in full: greedy decoding then
        equals the model's own. Scores of beams carry the error of the estimate of log Z, some thousandths of a nat a
        word; :func:`rescore` gives those of the texts that were found to the last digits.
    seed
        Of prompts and of what the model writes.

    Returns
    -------
    Model
        The same object. Weights are shared; after training or a state dict changed them, the next step codes again the
        rows that did. What is written through ``weight.data`` PyTorch does not tell, nor in inference mode: then,
        and after much training, as what was measured stays, :func:`undo` and accelerate again.

    Raises
    ------
    TypeError, ValueError
        When the model has no output layer of its own, is accelerated already, or lies on another device; when
        `input_ids` are not words that it can read.
    """
    head = _output_layer(model)
    if isinstance(head, AcceleratedHead):
        raise ValueError("model: accelerated already; undo(model) first")
    if input_ids is not None:
        _check_text(model, input_ids)
    elif not hasattr(model, "generate"):
        raise TypeError(f"model: {type(model).__name__} does not write text; give input_ids for its hidden states")
    contexts = _contexts(model, head, input_ids, seed)
    decoder = TopKSoftmax.from_linear(
        head, min(k, head.weight.shape[0]), precision,
        contexts=contexts, method=method, output="filled", seed=seed, progress=progress,
    )  # fmt: skip
    ways: dict[str, Callable[[Any], object]] = {
        "preview": lambda states: decoder(torch.from_numpy(states)),
        "full": lambda states: head(torch.from_numpy(states).to(head.weight.dtype)),
    }
    with torch.no_grad():
        choices = measure_choices(ways, contexts.numpy(), seed) if method == "auto" else ((1, method),)
    replacement = AcceleratedHead(head, decoder, certify, choices)
    replacement.train(model.training)
    _settable(model).set_output_embeddings(replacement)
    if hasattr(model, "generate") and "generate" not in model.__dict__:  # one of the caller's own stays
        _settable(model).generate = MethodType(generate, model)
    return model


def generate(model: Any, *arguments: Any, **options: Any) -> Any:
    """Generate as the model's own class does, in the place of its method; tell its output layer what is needed."""
    config = arguments[1] if len(arguments) > 1 else options.get("generation_config")
    head = model.get_output_embeddings()
    # Of what more is given by place, logits processors may look at all.
    enough = (
        len(arguments) <= 2
        and isinstance(head, AcceleratedHead)
        and needs_ranks_alone(model, head.decoder.index.settings.k, config, options)
    )
    with ranks_alone(head if enough else None):
        return type(model).generate(model, *arguments, **options)


def undo(model: Model) -> Model:
    """Put the output layer back that :func:`accelerate` replaced; return the same model.

    Raises
    ------
    ValueError
        When the model is not accelerated.
    """
    head = _output_layer(model)
    if not isinstance(head, AcceleratedHead):
        raise ValueError("model: not accelerated, so there is nothing to undo")
    _settable(model).set_output_embeddings(head.head)
    if getattr(model.__dict__.get("generate"), "__func__", None) is generate:
        del model.__dict__["generate"]
    return model


@torch.no_grad()
def rescore(model: nn.Module, sequences: Tensor, start: int, *, eos_token_id: int | None = None) -> Tensor:
    """Return log-probabilities of texts that a model wrote, by its output layer itself, in one pass over them.

    Beam search by an accelerated model ranks texts by log Z estimated; these are the scores that the model itself
    gives them. Divided by ``length ** length_penalty`` they are the `sequences_scores` of transformers.

    Parameters
    ----------
    model
        Accelerated or not.
    sequences
        int64 ``[n, t]``, as ``generate`` returned them, without padding on the left.
    start
        Words of the prompt, at least 1; they do not count.
    eos_token_id
        Words after the first of these do not count either.

    Returns
    -------
    torch.Tensor
        float64 ``[n]``.
    """
    if sequences.ndim != 2 or not 1 <= start < sequences.shape[1]:
        raise ValueError(
            f"start={start}: expected 1 to {sequences.shape[-1] - 1}, for sequences {list(sequences.shape)}"
        )
    replacement = _output_layer(model)
    head = replacement.head if isinstance(replacement, AcceleratedHead) else replacement
    written = sequences[:, start:]
    _settable(model).set_output_embeddings(head)
    try:
        logits: Tensor = _settable(model)(sequences[:, :-1]).logits[:, start - 1 :].double()
    finally:
        _settable(model).set_output_embeddings(replacement)
    found = logits.log_softmax(-1).gather(-1, written[..., None])[..., 0]
    if eos_token_id is not None:
        ended = (written == eos_token_id).long()
        found = found.masked_fill((ended.cumsum(1) - ended) > 0, 0.0)
    return found.sum(1)


def _state_of(head: nn.Linear) -> list[tuple[int, int]]:
    """Return what changes when the layer's numbers are replaced or written to."""
    parts = [head.weight] if head.bias is None else [head.weight, head.bias]
    return [(part.data_ptr(), -1 if part.is_inference() else part._version) for part in parts]


def _check_text(model: Any, input_ids: Tensor) -> None:
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        kind = (
            f"{input_ids.dtype} {list(input_ids.shape)}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        )
        raise TypeError(f"input_ids: expected a tensor of int64 [n, t], got {kind}")
    if input_ids.numel() < CONTEXTS_LEAST:
        raise ValueError(f"input_ids holds {input_ids.numel()} words: expected at least {CONTEXTS_LEAST}")
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    words = getattr(embeddings, "num_embeddings", None)
    if words is not None and (int(input_ids.min()) < 0 or int(input_ids.max()) >= words):
        raise ValueError(
            f"input_ids: expected words 0 to {words - 1}, got {int(input_ids.min())} to {int(input_ids.max())}"
        )
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if longest is not None and input_ids.shape[1] > longest:
        raise ValueError(
            f"input_ids: {input_ids.shape[1]} words a row, but the model reads {longest}; cut it in pieces"
        )


def _settable(model: nn.Module) -> Any:
    # transformers' own methods, which nn.Module does not declare
    return model


def _output_layer(model: nn.Module) -> Any:
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "set_output_embeddings"):
        raise TypeError(f"model: expected a causal language model of transformers, got {type(model).__name__}")
    head = _settable(model).get_output_embeddings()
    if not isinstance(head, nn.Linear | AcceleratedHead):
        raise TypeError(f"model: its output layer is {type(head).__name__}; expected a torch.nn.Linear")
    return head


@torch.no_grad()
def _contexts(model: Any, head: nn.Linear, input_ids: Tensor | None, seed: int) -> Tensor:
    """Return the hidden states that reach the output layer while the model reads a text or writes one."""
    seen = _Sample(_CONTEXTS_MOST, seed)
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].reshape(-1, inputs[0].shape[-1])))
    training = [module.training for module in model.modules()]
    model.eval()
    try:
        if input_ids is None:
            _write(model, head.weight.shape[0], seed)
        else:
            for row in input_ids:
                model(row[None])
    finally:
        hook.remove()
        # One by one: parts may be frozen in a mode of their own.
        for module, mode in zip(model.modules(), training, strict=True):
            module.training = mode
    return seen.states().float()


class _Sample:
    """A sample of rows that come in blocks: those of the smallest random keys, in the order in which they came."""

    def __init__(self, most: int, seed: int) -> None:
        self._most, self._generator = most, torch.Generator().manual_seed(seed)
        self._rows: list[Tensor] = []
        self._keys = torch.empty(0, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        keys = torch.rand(len(rows), dtype=torch.float64, generator=self._generator)
        self._keys = torch.cat([self._keys, keys])
        self._rows.append(rows)
        if len(self._keys) > 2 * self._most:
            self.states()

    def states(self) -> Tensor:
        rows = torch.cat(self._rows)
        if len(rows) > self._most:
            kept = torch.topk(self._keys, self._most, largest=False).indices.sort().values
            rows, self._keys = rows[kept], self._keys[kept]
        self._rows = [rows]
        return rows


def _write(model: Any, words: int, seed: int) -> None:
    """Let the model write from random prompts."""
    prompts = torch.randint(words, (_SEQUENCES, _PROMPT), generator=torch.Generator().manual_seed(seed))
    longest = getattr(model.config, "max_position_embeddings", None) or _LENGTH
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, eos_token_id=None,
            max_length=min(_LENGTH, longest), pad_token_id=0,
        )  # fmt: skip

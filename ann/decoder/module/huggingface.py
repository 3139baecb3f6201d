"""The decoder in a model of transformers: ``generate`` goes on as before, without the full product.

The output layer is replaced by one that knows what the call of ``generate`` under way needs. Where that is the largest
logits, these are looked for, the fastest way; where it is these beyond doubt, they are proven; beams see the largest
logits and, for all other words, an equal share of what is left of the partition function. All else takes the full
layer. :func:`undo` puts the layer back.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from memhier.ann.decoder.calibration.build import CONTEXTS_LEAST
from memhier.ann.decoder.calibration.calibrate import measure_choices
from memhier.ann.decoder.calibration.settings import Choices, Method
from memhier.ann.decoder.index import way_for
from memhier.ann.decoder.module.contexts import read_contexts
from memhier.ann.decoder.module.decoder import TopKSoftmax
from memhier.ann.decoder.module.generation import need_of, needed_of, writing
from memhier.ann.decoder.module.outcome import Outcome, outcome_allows

__all__ = ["AcceleratedHead", "accelerate", "rescore", "undo"]

Model = TypeVar("Model", bound=nn.Module)


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
    choices, proofs
        ``(batch, way)`` in ascending order: whether log Z comes faster from a scan, or ``"full"``; and whether a proof
        does.
    outcome
        What the model makes of the layer's logits.
    generates
        Whether ``generate`` says what is needed, and other calls get the full layer. Without it all calls get the
        largest logits, and an equal share of what is left of Z for all other words.
    """

    head: nn.Linear

    def __init__(
        self,
        head: nn.Linear,
        decoder: TopKSoftmax,
        certify: bool = False,
        choices: Choices = ((1, "preview"),),
        *,
        proofs: Choices = ((1, "preview"),),
        outcome: Outcome = "same",
        generates: bool = False,
    ) -> None:
        super().__init__()
        self.__dict__["head"] = head
        # The layer's own parameters under their own names: a state dict stays what it was, and what it puts in the
        # place of one is in its place in the layer, too.
        self._parameters = head._parameters
        self.decoder, self.certify, self.choices, self.proofs = decoder, certify, choices, proofs
        self.outcome, self.generates = outcome, generates
        self._seen = _state_of(head)
        self._full: Counter[str] = Counter()
        self.calls = self.rows = self.completed = 0

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: those of the decoder, calls and rows, and which rows took the full layer.

        Returns
        -------
        dict
            Besides :meth:`TopKSoftmax.stats`: `calls` and `rows` (hidden states) while nothing was trained; `completed`
            rows that could not be proven; `full_layer`, by reason: rows that took the full layer, such as
            ``{"top_p": 20}`` by an option of ``generate``, or ``"faster"`` where it was measured to be.
        """
        own = {"calls": self.calls, "rows": self.rows, "completed": self.completed, "full_layer": dict(self._full)}
        return self.decoder.stats() | own

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., V]``; while the largest are enough, the least number for all others."""
        if self.training or (torch.is_grad_enabled() and (hidden.requires_grad or self.head.weight.requires_grad)):
            full: Tensor = self.head(hidden)
            return full
        self.calls += 1
        rows = hidden.numel() // hidden.shape[-1]
        self.rows += rows
        way, words, reason = self._way(rows)
        if way == "full":
            self._full[reason] += rows
            full = self.head(hidden)
            return full
        state = _state_of(self.head)
        if self._seen != state:  # trained on, loaded anew, or moved
            self.decoder.refresh(self.head)
            self._seen = state
        if way == "proven":
            return self._proven(hidden, words)
        if way == "largest":
            return self._laid_out(hidden, *self.decoder.topk(hidden))
        logits = self.decoder(hidden)
        return self._certified(hidden, logits) if self.certify else logits

    def _way(self, rows: int) -> tuple[str, int, str]:
        """Return the way that a batch of rows takes, how many of the largest logits it needs, and why if all."""
        need = needed_of(self)
        if need is None and self.generates:
            return "full", 0, "a call that is not of generate"
        way, words, reason = ("filled", 1, "") if need is None else (need.way, need.step(), need.reason)
        if way == "full":
            return way, 0, reason
        if way == "largest" and self.certify:
            way = "proven"
        if not outcome_allows(self.outcome, way):
            return "full", 0, "logits changed after the layer"
        if words > self.decoder.index.settings.k:
            return "full", 0, "more words than k"
        if way == "largest":
            fastest = self.decoder.index.way(rows)
        else:
            fastest = way_for(self.proofs if way == "proven" else self.choices, rows)
        if fastest == "full":
            return "full", 0, "faster"
        return way, words, ""

    def _laid_out(self, hidden: Tensor, values: Tensor, indices: Tensor) -> Tensor:
        least = torch.finfo(hidden.dtype).min
        logits = torch.full((*hidden.shape[:-1], self.head.weight.shape[0]), least, dtype=hidden.dtype)
        return logits.scatter_(-1, indices, values.to(hidden.dtype))

    def _proven(self, hidden: Tensor, words: int) -> Tensor:
        """The largest logits, where they are proven to be that; all of the layer's own where they are not."""
        states = hidden.detach().reshape(-1, hidden.shape[-1])
        found = self.decoder.index.topk(states.float().numpy(), words, certify=True)
        assert found.proven is not None
        flat = self._laid_out(states, torch.from_numpy(found.values), torch.from_numpy(found.indices))
        doubtful = torch.from_numpy(np.flatnonzero(~found.proven))
        if len(doubtful):
            self.completed += len(doubtful)
            flat[doubtful] = self.head(states[doubtful]).to(flat.dtype)
        return flat.reshape(*hidden.shape[:-1], flat.shape[-1])

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
    """Replace the output layer of a language model on the CPU, in place.

    ``generate`` goes on as before: greedy decoding and sampling among at most `k` words find the largest logits, beams
    these and log Z. What may look at others takes the full layer, as do calls of the model that are not of ``generate``
    (a loss, a loop of one's own): ``model.get_output_embeddings().stats()`` counts it by reason. Known not to look at
    others: `temperature`, and `top_p`, `min_p`, `typical_p`, `epsilon_cutoff` and `eta_cutoff` behind a `top_k`;
    `repetition_penalty`, `no_repeat_ngram_size`, words that are ruled out and least lengths, while all the words that
    they may rule out leave enough of the `k`; forced first and last words.

    Parameters
    ----------
    model
        Of transformers, or anything else with ``get_output_embeddings`` and ``set_output_embeddings``.
    k
        Largest logits that are looked for; at least what a sampler draws from (`top_k`), and more where logits
        processors rule words out: a penalty of repetition may do so with every word of the text.
    input_ids
        int64 ``[n, t]``: text whose hidden states teach the decoder, such as a few thousand words of what will be
        written; of a model with an encoder, texts to be read, from which it writes. When not given, the model writes
        some itself, from random prompts.
    precision, method
        As for :meth:`LogitIndex.build`. They hold for greedy decoding. Sampling takes a proof, beams a scan of all
        codes, or the full product where that is faster.
    certify
        Prove the words that greedy decoding chooses among, too, and compute steps that cannot be proven in full: it
        then equals the model's own. Scores of beams carry the error of the estimate of log Z, some thousandths of a nat
        a word; :func:`rescore` gives those of the texts that were found to the last digits.
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
        When the model has no output layer of its own, is accelerated already, reads no words, or lies on another
        device; when `input_ids` are not words that it can read.

    Warns
    -----
    UserWarning
        When the model makes something else of the layer's logits than to scale them, so that nothing can be gained.
        Where it scales or caps them (Cohere, Gemma 2), greedy decoding is accelerated, and by a scale in float32
        sampling, too; all else takes the full layer.
    """
    head = _output_layer(model)
    if isinstance(head, AcceleratedHead):
        raise ValueError("model: accelerated already; undo(model) first")
    if input_ids is not None:
        _check_text(model, input_ids)
    elif not hasattr(model, "generate"):
        raise TypeError(f"model: {type(model).__name__} does not write text; give input_ids for its hidden states")
    contexts, outcome = read_contexts(model, head, input_ids, seed)
    if outcome == "other":
        warnings.warn(
            f"{type(model).__name__}: its logits are not those of its output layer, so every step takes the full layer "
            "and nothing is gained",
            stacklevel=2,
        )
    decoder = TopKSoftmax.from_linear(
        head, min(k, head.weight.shape[0]), precision,
        contexts=contexts, method=method, output="filled", seed=seed, progress=progress,
    )  # fmt: skip
    choices, proofs = _measured(head, decoder, contexts, seed) if method == "auto" else 2 * (((1, method),),)
    replacement = AcceleratedHead(
        head, decoder, certify, choices, proofs=proofs, outcome=outcome, generates=hasattr(model, "generate")
    )
    replacement.train(model.training)
    _settable(model).set_output_embeddings(replacement)
    if hasattr(model, "generate") and "generate" not in model.__dict__:  # one of the caller's own stays
        _settable(model).generate = MethodType(generate, model)
    return model


def generate(model: Any, *arguments: Any, **options: Any) -> Any:
    """Generate as the model's own class does, in the place of its method; tell its output layer what is needed."""
    head = model.get_output_embeddings()
    if not isinstance(head, AcceleratedHead):
        return type(model).generate(model, *arguments, **options)
    with writing(head, need_of(model, arguments, options)):
        return type(model).generate(model, *arguments, **options)


@torch.no_grad()
def _measured(head: nn.Linear, decoder: TopKSoftmax, contexts: Tensor, seed: int) -> tuple[Choices, Choices]:
    """Return for sizes of batch whether scan and proof are faster than the layer."""
    index = copy.copy(decoder.index)  # it does not look at these contexts as at those in use
    trial, k = TopKSoftmax(index, head.weight, head.bias, "filled"), index.settings.k
    ways: dict[Method, Callable[[Any], object]] = {
        "preview": lambda states: trial(torch.from_numpy(states)),
        "full": lambda states: head(torch.from_numpy(states).to(head.weight.dtype)),
    }
    choices = measure_choices(ways, contexts.numpy(), seed)
    ways["preview"] = lambda states: index.topk(states, k, certify=True, complete=True)
    return choices, measure_choices(ways, contexts.numpy(), seed)


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

"""The decoder in a model of transformers: ``generate`` goes on as before, without the full product.

:func:`accelerate` replaces the output layer by one that knows the needs of the call of ``generate`` under way. A call
that needs the largest logits gets them the fastest way; a call that needs them beyond doubt gets them proven; beams get
the largest logits and, for all other words, equal shares of the rest of the partition function. Where the processors of
a call are understood, they look at hidden states in the place of logits, and find or draw each word exactly. All other
calls take the full layer. :func:`undo` puts the layer back.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from memhier.ann.decoder.answers import TopK
from memhier.ann.decoder.calibration.build import CONTEXTS_LEAST
from memhier.ann.decoder.calibration.calibrate import measure_choices
from memhier.ann.decoder.calibration.settings import Choices, Method
from memhier.ann.decoder.index import LogitIndex, way_for
from memhier.ann.decoder.layer import BIAS_ROUNDING, Floats, norm_rounding
from memhier.ann.decoder.module import operators
from memhier.ann.decoder.module.beams import BeamSteps, Search, search_of
from memhier.ann.decoder.module.contexts import read_contexts
from memhier.ann.decoder.module.decoder import TopKSoftmax
from memhier.ann.decoder.module.generation import Logits, Need, need_of, needed_of, writing
from memhier.ann.decoder.module.outcome import Change, Outcome, outcome_allows
from memhier.ann.decoder.module.sampling import HEAD_WORDS
from memhier.ann.decoder.module.steps import StepScores, steps_of
from memhier.ann.decoder.module.watch import digest_of, is_computed, is_hooked, marks_of, state_of, unlike

__all__ = ["AcceleratedHead", "accelerate", "rescore", "undo"]

Model = TypeVar("Model", bound=nn.Module)
_PROCESSORS = "_get_logits_processor"  # the method of transformers that lists the processors of a call


class AcceleratedHead(nn.Linear):
    """Stands in for an output layer while nothing is trained.

    It is a Linear to adapters and quantisers, which look for these.

    Parameters
    ----------
    head
        The layer; it still computes all logits that need gradients.
    decoder
        A decoder of the layer, with ``output="filled"``.
    certify
        Whether to prove the likeliest word, and to let the layer itself compute a word that cannot be proven.
    choices, proofs
        ``(batch, way)`` in ascending order: the faster way to log Z, and to a proof; ``"full"`` is the layer.
    outcome, change
        How the model changes the layer's logits, and the formula of the change; None if it is not known.
    generates
        True: ``generate`` states its needs, and other calls get the full layer. False: all calls get the largest logits
        and, for all other words, equal shares of the rest of Z.

    Examples
    --------
    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from memhier.ann.huggingface import accelerate
    >>> _ = torch.manual_seed(0)
    >>> config = GPT2Config(vocab_size=500, n_embd=16, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    >>> model = GPT2LMHeadModel(config).eval()
    >>> head = accelerate(model, k=8, input_ids=torch.randint(500, (8, 32))).get_output_embeddings()
    >>> words = model.generate(torch.tensor([[1, 2]]), max_new_tokens=5, do_sample=False)
    >>> type(head).__name__, head.stats()["calls"] > 0
    ('AcceleratedHead', True)
    """

    head: nn.Linear
    decoder: TopKSoftmax

    def __init__(
        self,
        head: nn.Linear,
        decoder: TopKSoftmax,
        certify: bool = False,
        choices: Choices = ((1, "preview"),),
        *,
        proofs: Choices = ((1, "preview"),),
        outcome: Outcome = "same",
        change: Change | None = None,
        generates: bool = False,
    ) -> None:
        nn.Module.__init__(self)  # Linear's own makes weights
        # Both modules share their dictionaries, which torch has no public way to do: a state dict keeps its names, and
        # a parameter or hook that is set in one is set in both. All calls are of this one, so a hook runs once.
        self.__dict__.update({name: value for name, value in vars(head).items() if name != "forward"})
        self.__dict__["head"] = head
        self.proofs: Choices
        self.choices: Choices
        self.certify: bool
        self.__dict__["decoder"] = decoder
        self.certify, self.choices, self.proofs = certify, choices, proofs
        self.generates: bool
        self.change: Change | None
        self.outcome, self.change, self.generates = outcome, change, generates
        self._seen, self._digest = state_of(head), digest_of(head)
        self.marks: list[object] = []
        self._full: Counter[str] = Counter()
        self.calls: int
        self.completed: int
        self.rows: int
        self.calls = self.rows = self.completed = 0
        self._prover: LogitIndex | None = None
        self._number: int = operators.enrol(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied layer, which is another one to operators."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._number = operators.enrol(self)

    def extra_repr(self) -> str:
        """Return the sizes, precision, way and output of the decoder, for ``print(model)``."""
        return self.decoder.extra_repr()

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: those of the decoder, and counts of calls, rows and rows that took the full layer.

        Returns
        -------
        dict
            Besides :meth:`TopKSoftmax.stats`: `calls` and `rows` (hidden states) outside training; `completed` rows,
            which could not be proven; and `full_layer`, the rows that took the full layer by reason, such as
            ``{"top_p": 20}`` for an option of ``generate``, or ``"faster"`` if it was measured to be.
        """
        own = {"calls": self.calls, "rows": self.rows, "completed": self.completed, "full_layer": dict(self._full)}
        found = self.decoder.stats() | own
        if self._prover is not None:
            found["memory_bytes"] += self._prover.memory_bytes
        return found

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., V]``; words outside the largest logits get the least number if nothing needs them."""
        parts = (hidden, *self.parameters(), *self.head.parameters()) if torch.is_grad_enabled() else ()
        if self.training or any(part.requires_grad for part in parts):
            return self.full(hidden)
        if torch.compiler.is_compiling():  # an operator, as the needs of a call are no part of a graph
            found: Tensor = operators.logits(hidden, self._number, self.out_features)
            return found
        return self.all_logits(hidden)

    def all_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of :meth:`forward` where nothing is trained."""
        self.calls += 1
        rows = hidden.numel() // hidden.shape[-1]
        self.rows += rows
        kind, words, reason = self._needed(rows)
        need = needed_of(self)
        if need is not None:
            need.hidden = None
        if need is not None and (need.beams or (kind == "full" and self._may_wait(need, rows, reason))):
            self._refresh()
            # A compiled model writes to the memory of its hidden states again.
            need.hidden = hidden.detach().reshape(len(hidden), -1, hidden.shape[-1])[:, -1].clone()
            # The call's processors look at hidden states; nothing reads these numbers.
            return hidden.new_zeros(()).expand(*hidden.shape[:-1], self.head.weight.shape[0])
        if kind == "full":
            self._full[reason] += rows
            return self.full(hidden)
        self._refresh()
        if kind == "proven":
            return self.proven(hidden, words, ordered=need is not None and need.logits == "largest")
        return self._laid_out(hidden, *self.topk(hidden)) if kind == "largest" else self.filled(hidden)

    def full(self, hidden: Tensor) -> Tensor:
        """Return the logits of the layer itself, as it is now."""
        if any(name not in self._parameters and hasattr(self, name) for name in ("weight", "bias")):
            # A parametrization or a mask took the parameter out, and gives its result to this module alone.
            return nn.functional.linear(hidden, self.weight, self.bias)
        found: Tensor = self.head.forward(hidden)  # hooks take part in the call of this module
        return found

    def filled(self, hidden: Tensor) -> Tensor:
        """Return the largest logits and, for all other words, equal shares of the rest of Z."""
        logits: Tensor = self.decoder(hidden)
        return self.proven(hidden, 1, logits) if self.certify else logits

    def topk(self, hidden: Tensor, k: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the result of :meth:`TopKSoftmax.topk`."""
        return self.decoder.topk(hidden, k)

    def count(self, rows: int, reason: str) -> None:
        """Count rows that took the full layer."""
        if rows:
            self._full[reason] += rows

    def prover(self) -> LogitIndex:
        """Return the index of beams, whose codes have all directions; the first call of beams makes it."""
        if self._prover is None:
            self._prover = self.decoder.index.with_all_directions()
        return self._prover

    def _refresh(self) -> None:
        state = state_of(self.head)
        if self._seen != state:  # trained on, loaded anew, or moved
            self.decoder.refresh(self.head)
            self._seen, self._digest, self._prover = state, digest_of(self.head), None

    def notice(self) -> None:
        """Let the next step code the layer's rows again where they differ, as after writes to ``weight.data``.

        ``generate`` calls this. It reads the layer once, which costs about as much as a full product of one state.
        """
        if self._digest != digest_of(self.head):
            self._seen = []

    def obstacle(self) -> str:
        """Return the reason why all calls take the full layer for now; empty if there is none."""
        if self.training or torch.is_autocast_enabled("cpu"):
            return "training" if self.training else "autocast"
        return "hooks of the layer" if is_hooked(self, self.head) else unlike(self.head, self.decoder.index.shape)

    def _may_wait(self, need: Need, rows: int, reason: str) -> bool:
        """Say if the processors of the call can do without logits, and if that is faster."""
        return need.waits and reason != "faster" and self.decoder.index.draws_pay(rows, HEAD_WORDS)

    def _needed(self, rows: int) -> tuple[Logits, int, str]:
        """Return the kind of logits for a batch of rows, how many of the largest it needs, and the reason if all."""
        need = needed_of(self)
        if need is None:
            if self.generates:
                return "full", 0, "a call that is not of generate"
            obstacle = self.obstacle()
            need = Need("full" if obstacle else "filled", obstacle)
        kind, words = need.logits, need.step()
        if kind == "full":
            return "full", 0, need.reason
        if kind == "largest" and self.certify:
            kind = "proven"
        if not outcome_allows(self.outcome, kind):
            return "full", 0, "logits changed after the layer"
        if words > self.decoder.index.settings.k:
            return "full", 0, "more words than k"
        if kind == "largest":
            fastest = self.decoder.index.way(rows)
        else:
            fastest = way_for(self.proofs if kind == "proven" else self.choices, rows)
        if fastest == "full":
            return "full", 0, "faster"
        return kind, words, ""

    def _laid_out(self, hidden: Tensor, values: Tensor, indices: Tensor) -> Tensor:
        least = torch.finfo(hidden.dtype).min
        logits = torch.full((*hidden.shape[:-1], self.head.weight.shape[0]), least, dtype=hidden.dtype)
        return logits.scatter_(-1, indices, values.to(hidden.dtype))

    def proven(self, hidden: Tensor, words: int, logits: Tensor | None = None, *, ordered: bool = False) -> Tensor:
        """Return the largest logits of states whose answer is proven, and all logits of the layer for the others.

        Given `logits` stay, if their largest is the proven one. With `ordered` the order of the words is proven, too.
        """
        states = hidden.detach().reshape(-1, hidden.shape[-1])
        index = self.decoder.index
        found = index.topk(states.float().numpy(), words, certify=True)
        assert found.proven is not None
        if logits is None:
            flat = self._laid_out(states, torch.from_numpy(found.values), torch.from_numpy(found.indices))
            right = found.proven & _in_order(found, states, index.largest_norm) if ordered else found.proven
        else:
            flat = logits.reshape(-1, logits.shape[-1])
            # A proven word may be missing among the largest estimates that `logits` were made from.
            right = found.proven & (flat.argmax(-1).numpy() == found.indices[:, 0])
        doubtful = torch.from_numpy(np.flatnonzero(~right))
        if len(doubtful):
            self.completed += len(doubtful)
            flat[doubtful] = self.head(states[doubtful]).to(flat.dtype)
        return flat.reshape(*hidden.shape[:-1], flat.shape[-1])


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

    ``generate`` works as before: greedy decoding and sampling among at most `k` words find the largest logits, beams
    find these and log Z. Other samplers draw from the model's own distribution (see :meth:`TopKSoftmax.sample`; for one
    seed the words are others than the model's own draws). Penalties, biases, forced, suppressed and allowed words, and
    the user's `prefix_allowed_tokens_fn`, which is asked again in a step in doubt, are applied to the exact logits of
    the words that they change. Scales and caps of logits (Cohere, Granite, Gemma 2) count in all of this.

    Options that may look at other logits take the full layer: processors of your own, watermarks, guidance, `top_h`,
    scores as output, and beams that draw, or with biases, raising penalties or allowed words. So do `typical_p` and
    `eta_cutoff` behind a `top_p` without a `top_k`, steps in doubt, a layer with hooks, autocast, and calls of the
    model outside ``generate`` (a loss, a loop of your own). ``model.get_output_embeddings().stats()`` counts their rows
    by reason. Prompt look-up and an assistant model find the largest logits of all positions. An adapter on the layer
    (PEFT), a parametrization, a mask, a quantiser or another dtype take the full layer for as long as they last, and so
    do a new scale or cap of logits, hooks and a forward that the model got since.

    Parameters
    ----------
    model
        A model of transformers, or any with ``get_output_embeddings`` and ``set_output_embeddings``.
    k
        How many of the largest logits to find: at least the `top_k` of a sampler, and more if logits processors rule
        words out; a penalty of repetition may rule out every word of the text.
    input_ids
        int64 ``[n, t]``: text whose hidden states teach the decoder, such as a few thousand words like those to be
        written. A model with an encoder reads it and writes from it. If None, the model writes text itself, from
        random prompts.
    precision, method
        As for :meth:`LogitIndex.build`. They hold for greedy decoding. Sampling takes a proof, and beams a scan of all
        codes, or both the full product if that is faster.
    certify
        Prove the words of greedy decoding, too, and compute steps that cannot be proven in full: the text then equals
        the model's own, except for ties within rounding. Beams of a float32 layer are decided by proven bounds of log
        Z: the first call makes codes of all directions for them, a byte for each weight. With processors that do more
        than take words out, with `stop_strings`, or for another dtype they take the full layer. Without `certify`,
        scores of beams carry the error of the estimate of log Z, some thousandths of a nat a word; :func:`rescore`
        scores the texts to the last digits.
    seed
        Decides on the prompts and on the words that the model writes.
    progress
        Show a progress bar.

    Returns
    -------
    Model
        The same object. It shares its weights; after training or a state dict changes rows, the next step codes these
        again. PyTorch does not report writes through ``weight.data`` or in inference mode: each call of ``generate``
        reads the layer once to notice them. A model without ``generate`` needs ``get_output_embeddings().notice()``
        after such writes. After much training call :func:`undo` and accelerate again: the measurements of the build
        stay as they were. Do so after ``resize_token_embeddings``, too, whose layer is taken in full.

    Raises
    ------
    TypeError, ValueError
        If the model has no output layer of its own, is accelerated already, reads no words, or lies on another device;
        if the layer's weights are computed from others; if `input_ids` are not words that it can read.

    Warns
    -----
    UserWarning
        If the model changes the layer's logits in another way than to scale or cap them, so that nothing is gained.
        Beams of a model that scales or caps them take the full layer.

    Examples
    --------
    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from memhier.ann.huggingface import accelerate
    >>> _ = torch.manual_seed(0)
    >>> config = GPT2Config(vocab_size=500, n_embd=16, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    >>> model = GPT2LMHeadModel(config).eval()
    >>> prompt = torch.tensor([[1, 2]])
    >>> before = model.generate(prompt, max_new_tokens=5, do_sample=False)
    >>> model = accelerate(model, k=8, input_ids=torch.randint(500, (8, 32)), certify=True)
    >>> bool((model.generate(prompt, max_new_tokens=5, do_sample=False) == before).all())
    True
    """
    head = _output_layer(model)
    if isinstance(head, AcceleratedHead):
        raise ValueError("model: accelerated already; undo(model) first")
    if is_computed(head):
        raise TypeError("model: the weights of its output layer are computed from others, by a parametrization, a mask "
                        "or a quantiser; expected parameters of their own")  # fmt: skip
    if input_ids is not None:
        _check_text(model, input_ids)
    elif not hasattr(model, "generate"):
        raise TypeError(f"model: {type(model).__name__} does not write text; give input_ids for its hidden states")
    contexts, outcome, change = read_contexts(model, head, input_ids, seed)
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
    replacement = AcceleratedHead(
        head, decoder, certify, ((1, method),), proofs=((1, method),),
        outcome=outcome, change=change, generates=hasattr(model, "generate"),
    )  # fmt: skip
    if method == "auto":
        replacement.choices, replacement.proofs = _measured(replacement, contexts, seed)
    replacement.marks = marks_of(model)
    replacement.train(model.training)
    _settable(model).set_output_embeddings(replacement)
    if hasattr(model, "generate") and "generate" not in model.__dict__:  # one of the caller's own stays
        # Not bound methods, which pickle looks for by name in the model's class.
        _settable(model).generate = partial(generate, model)
        setattr(model, _PROCESSORS, partial(processors_of, model))
    return model


def generate(model: Any, *arguments: Any, **options: Any) -> Any:
    """Generate as the model's own class does, in the place of its method; tell its output layer the call's needs."""
    head = model.get_output_embeddings()
    if not isinstance(head, AcceleratedHead):
        return type(model).generate(model, *arguments, **options)
    obstacle = head.obstacle() or ("" if head.marks == marks_of(model) else "logits changed otherwise than at first")
    if not obstacle:
        head.notice()
    with writing(head, Need("full", obstacle) if obstacle else need_of(model, arguments, options)):
        return type(model).generate(model, *arguments, **options)


def processors_of(model: Any, *arguments: Any, **options: Any) -> Any:
    """Return the processors of a call of ``generate``, in the place of the model's method.

    If all are understood, they stand behind one that finds the words for which they need logits.
    """
    processors = getattr(type(model), _PROCESSORS)(model, *arguments, **options)
    head = model.get_output_embeddings()
    need = needed_of(head) if isinstance(head, AcceleratedHead) else None
    config = options.get("generation_config", arguments[0] if arguments else None)
    if need is not None and need.logits == "filled" and head.certify:
        return _beams_of(head, need, processors, config)
    if need is None or not need.may_wait or head.change is None:
        return processors
    steps = steps_of(processors, samples=bool(getattr(config, "do_sample", False)))
    if isinstance(steps, str):
        need.reason = need.reason or steps
        return processors
    need.waits = True
    return type(processors)([StepScores(head, need, processors, steps)])


def _beams_of(head: AcceleratedHead, need: Need, processors: Any, config: Any) -> Any:
    """Return the processors of a call with beams that are to be proven; such as cannot be take the full layer."""
    search: Search | str = "num_beams of this layer"
    index = head.decoder.index
    if head.change == Change() and head.head.weight.dtype == torch.float32 and need.words <= index.shape[0]:
        search = search_of(config, processors, need.words)
    if not isinstance(search, str) and not index.draws_pay(search.beams, HEAD_WORDS, all_directions=True):
        search = "faster"
    if isinstance(search, str):
        need.logits, need.reason = "full", search
        return processors
    need.beams = True
    return type(processors)([BeamSteps(head, need, processors, search)])


@torch.no_grad()
def _measured(replacement: AcceleratedHead, contexts: Tensor, seed: int) -> tuple[Choices, Choices]:
    """Return the faster way by batch size, of scan and layer and of proof and layer."""
    head, index = replacement.head, copy.copy(replacement.decoder.index)  # it counts these contexts by itself
    trial = AcceleratedHead(head, TopKSoftmax(index, head.weight, head.bias, "filled"), replacement.certify)
    choices: list[Choices] = []
    for scan in (trial.filled, partial(trial.proven, words=index.settings.k)):

        def scanned(states: Floats, scan: Callable[[Tensor], Tensor] = scan) -> Tensor:
            return scan(torch.from_numpy(states).to(head.weight.dtype))

        ways: dict[Method, Callable[[Floats], object]] = {"preview": scanned}
        ways["full"] = lambda states: head(torch.from_numpy(states).to(head.weight.dtype))
        choices.append(measure_choices(ways, contexts.numpy(), seed))
    return choices[0], choices[1]


def undo(model: Model) -> Model:
    """Put the output layer back that :func:`accelerate` replaced; return the same model.

    Raises
    ------
    ValueError
        If the model is not accelerated, or its layer got a parametrization, a mask or a forward of its own since.

    Examples
    --------
    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from memhier.ann.huggingface import accelerate, undo
    >>> _ = torch.manual_seed(0)
    >>> config = GPT2Config(vocab_size=500, n_embd=16, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    >>> model = GPT2LMHeadModel(config).eval()
    >>> model = undo(accelerate(model, k=8, input_ids=torch.randint(500, (8, 32))))
    >>> type(model.get_output_embeddings()).__name__
    'Linear'
    """
    head = _output_layer(model)
    if not isinstance(head, AcceleratedHead):
        raise ValueError("model: not accelerated, so there is nothing to undo")
    now, layer = vars(head), vars(head.head)
    if "forward" in now or not all(hasattr(head.head, name) for name in ("weight", "bias")):
        raise ValueError(
            "model: its output layer has a parametrization, a mask or a forward of its own; remove it first"
        )
    layer.update({name: now[name] for name in layer if name in now})  # its mode, and others that were set since
    _settable(model).set_output_embeddings(head.head)
    for name, own in (("generate", generate), (_PROCESSORS, processors_of)):
        if getattr(model.__dict__.get(name), "func", None) is own:
            del model.__dict__[name]
    return model


@torch.no_grad()
def rescore(model: nn.Module, sequences: Tensor, start: int, *, eos_token_id: int | None = None) -> Tensor:
    """Return log-probabilities of texts that a model wrote, by its output layer itself, in one pass over them.

    Beam search by an accelerated model ranks texts by an estimate of log Z; this function returns the model's own
    scores. Divided by ``length ** length_penalty`` they are the `sequences_scores` of transformers.

    Parameters
    ----------
    model
        Accelerated or not.
    sequences
        int64 ``[n, t]``, as ``generate`` returns them, without padding on the left.
    start
        Length of the prompt, at least 1; its words do not count.
    eos_token_id
        The word that ends a text; words after it do not count.

    Returns
    -------
    torch.Tensor
        float64 ``[n]``.

    Raises
    ------
    ValueError
        If `start` leaves no word to score.

    Examples
    --------
    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from memhier.ann.huggingface import rescore
    >>> _ = torch.manual_seed(0)
    >>> config = GPT2Config(vocab_size=500, n_embd=16, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    >>> model = GPT2LMHeadModel(config).eval()
    >>> texts = model.generate(torch.tensor([[1, 2]]), max_new_tokens=5, num_beams=3, num_return_sequences=3)
    >>> scores = rescore(model, texts, start=2, eos_token_id=0)
    >>> scores.shape, bool((scores < 0).all())
    (torch.Size([3]), True)
    """
    if sequences.ndim != 2 or not 1 <= start < sequences.shape[1]:
        raise ValueError(
            f"start={start}: expected 1 to {sequences.shape[-1] - 1}, for sequences {list(sequences.shape)}"
        )
    written = sequences[:, start:]
    with writing(_output_layer(model), Need("full", "rescore")):
        logits: Tensor = _settable(model)(sequences[:, :-1]).logits[:, start - 1 :].double()
    found = logits.log_softmax(-1).gather(-1, written[..., None])[..., 0]
    if eos_token_id is not None:
        ended = (written == eos_token_id).long()
        found = found.masked_fill((ended.cumsum(1) - ended) > 0, 0.0)
    return found.sum(1)


def _in_order(found: TopK, states: Tensor, largest_norm: float) -> npt.NDArray[np.bool_]:
    """Say of which states the layer, which rounds at other places, gives the words found the same order or ties."""
    values = torch.from_numpy(found.values).double()
    doubt = norm_rounding(states.shape[1]) * largest_norm * states.double().norm(dim=1, keepdim=True)
    doubt = doubt + BIAS_ROUNDING * values.abs()
    low, high = (values - doubt).to(states.dtype), (values + doubt).to(states.dtype)
    right: npt.NDArray[np.bool_] = ((low[:, :-1] > high[:, 1:]) | (low[:, 1:] == high[:, :-1])).all(1).numpy()
    return right


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
    if not isinstance(head, nn.Linear):
        kind = f"{type(head).__module__}.{type(head).__qualname__}"
        raise TypeError(f"model: its output layer is {kind}; expected a torch.nn.Linear. Merge adapters into it first")
    return head

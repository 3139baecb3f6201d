"""TopKSoftmax: the decoder as a PyTorch module that takes the place of an output layer."""

from collections import Counter
from os import PathLike
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from memhier.ann.decoder.answers import LogProb, Partition, TopK
from memhier.ann.decoder.calibration.settings import Method
from memhier.ann.decoder.index import LogitIndex
from memhier.ann.decoder.layer import check_finite, check_hidden
from memhier.ann.decoder.module import operators
from memhier.ann.decoder.module.operators import enrol
from memhier.ann.decoder.module.sampling import Layer, Sampler
from memhier.ann.decoder.module.truncation import Truncation
from memhier.arguments import check_int
from memhier.shield import shielded

__all__ = ["SparseLogits", "TopKSoftmax"]

_FORMATS = ("dense", "sparse", "filled")
_FLOAT32 = np.dtype(np.float32)


class SparseLogits(NamedTuple):
    """The largest logits alone.

    Attributes
    ----------
    values
        ``[..., k]``, in the dtype of the hidden states, largest first.
    indices
        int64 ``[..., k]``: the words.

    Examples
    --------
    >>> import torch
    >>> from memhier.ann import TopKSoftmax
    >>> _ = torch.manual_seed(0)
    >>> lm_head, hidden = torch.nn.Linear(16, 500), torch.randn(3, 16)
    >>> decoder = TopKSoftmax.from_linear(lm_head, k=5, output="sparse")
    >>> with torch.no_grad():
    ...     logits = decoder(hidden)
    >>> logits.values.shape, bool((logits.indices[:, 0] == lm_head(hidden).argmax(1)).all())
    (torch.Size([3, 5]), True)
    """

    values: Tensor
    indices: Tensor


class TopKSoftmax(nn.Module):
    """Finds the largest logits of an output layer without computing all of them.

    Make one with :meth:`from_linear`; it shares the layer's weights. Hidden states may have any leading shape.

    Examples
    --------
    >>> import torch
    >>> from memhier.ann import TopKSoftmax
    >>> _ = torch.manual_seed(0)
    >>> lm_head = torch.nn.Linear(32, 1000)
    >>> hidden = torch.randn(500, 32)
    >>> decoder = TopKSoftmax.from_linear(lm_head, k=5, contexts=hidden[1:])
    >>> values, indices = decoder.topk(hidden[:1])
    >>> bool(indices[0, 0] == lm_head(hidden[0]).argmax())
    True
    """

    _weight: Tensor | None
    _bias: Tensor | None
    _computed: bool

    def __init__(self, index: LogitIndex, weight: Tensor | None, bias: Tensor | None, output: str = "dense") -> None:
        super().__init__()
        _check_output(output)
        self.output: str
        self.index: LogitIndex
        self.index, self.output = index, output
        self._share(weight, bias)
        self.rows_with_gradients: int = 0
        self._sampled_in_full: Counter[str] = Counter()
        self._number: int = enrol(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied module, which is another one to operators."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._number = enrol(self)

    @classmethod
    def from_linear(
        cls,
        lm_head: nn.Linear,
        k: int = 10,
        precision: float = 0.99,
        dram: int | str | None = None,
        *,
        path: str | PathLike[str] | None = None,
        contexts: Tensor | None = None,
        method: Method = "auto",
        output: str = "dense",
        rank: int | None = None,
        seed: int = 0,
        audit: float = 0.0,
        progress: bool = False,
    ) -> Self:
        """Build a decoder of an output layer.

        Parameters
        ----------
        lm_head
            A layer on the CPU, float32, float16 or bfloat16, with or without bias. The module shares its weights, tied
            embeddings too; call :meth:`refresh` after they change.
        dram, path
            Both, or neither. With both, the rows of the layer lie in the new directory `path` and in DRAM if they fit,
            and this module keeps no reference to the layer.
        contexts
            Real hidden states ``[n, D]`` to learn from and to measure with. See :meth:`LogitIndex.build` for these and
            the other parameters.
        output
            The result of :meth:`forward`: ``"dense"`` logits, minus infinity except for the k largest; ``"sparse"``; or
            ``"filled"``: dense logits in which all other words share the rest of Z evenly, so that a softmax gives the
            k largest their probabilities among all words.

        Raises
        ------
        TypeError, ValueError
            If the layer or a parameter does not fit; the message names it.
        """
        _check_output(output)
        weight, bias = _check_linear(lm_head)
        index = LogitIndex.build(
            *_arrays(weight, bias),
            dtype=_name(weight),
            contexts=None if contexts is None else _states(contexts, "contexts"),
            k=k, precision=precision, method=method, rank=rank, dram=dram, path=path, seed=seed, audit=audit,
            progress=progress,
            full=lambda states: _full(torch.from_numpy(states), weight, bias, k),
        )  # fmt: skip
        return (
            cls(index, lm_head.weight, getattr(lm_head, "bias", None), output)
            if path is None
            else cls._around(index, output)
        )

    def extra_repr(self) -> str:
        """Return sizes, precision, way and output, for ``print(model)``."""
        words, dimension = self.index.shape
        k, precision = self.index.settings.k, self.index.settings.precision
        return (
            f"{dimension} -> {words}, k={k}, precision={precision}, way={self.index.way(1)!r}, output={self.output!r}"
        )

    def stats(self) -> dict[str, Any]:
        """Return the plain numbers of :meth:`LogitIndex.stats`, `rows_with_gradients` and `sampled_in_full`.

        The first are hidden states for which :meth:`forward` computed the full layer because torch recorded gradients,
        the second those for which :meth:`sample` did, by cause.
        """
        own = {"rows_with_gradients": self.rows_with_gradients, "sampled_in_full": dict(self._sampled_in_full)}
        return self.index.stats() | own

    def topk(self, hidden: Tensor, k: int | None = None, *, allowed: Any = None) -> tuple[Tensor, Tensor]:
        """Return the k largest logits of each hidden state and their words, without gradients.

        Parameters
        ----------
        hidden
            ``[..., D]`` on the CPU, of any floating dtype.
        k
            1 to V; the build's k if None.
        allowed
            Words that an answer may hold, tensors or arrays as in :meth:`LogitIndex.topk`: a mask, bits, or ids, for
            all hidden states or for each of the `n` that `hidden` has in order.

        Returns
        -------
        tuple of torch.Tensor
            float32 and int64 ``[..., k]``, largest first; -inf and -1 where fewer than k words are allowed.
        """
        states, index = _states(hidden), self.index
        if allowed is not None:
            found = index.topk(states, k, allowed=_arrays_of(allowed))
            return _shaped(found, hidden)
        way = index.way(len(states))
        if self._weight is None or way != "full" or not (k is None or 0 < k <= index.shape[0]):
            return _shaped(index.topk(states, k, method=way if k is None else None), hidden)
        check_finite(check_hidden("hidden", states, index.shape[1]))
        wanted = index.settings.k if k is None else k
        values, indices = self._full(hidden.reshape(-1, hidden.shape[-1]), wanted)
        shape = (*hidden.shape[:-1], wanted)
        return values.float().reshape(shape), indices.reshape(shape)

    def certified_topk(
        self, hidden: Tensor, k: int | None = None, *, allowed: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of :meth:`topk`, and bool ``[...]``: True for proven answers.

        Answers without a proof come from the full product, but for ties within rounding in a batch of a float32 layer;
        so do all answers of a batch for which that costs less. :meth:`LogitIndex.topk` says more under `complete`.
        Arguments as in :meth:`topk`.
        """
        states, words, index = _states(hidden), _arrays_of(allowed), self.index
        own = self._weight is None or words is not None
        if not own and not index.proof_pays(len(states)):
            wanted = index.settings.k if k is None else check_int("k", k, 1, index.shape[0], "words")
            states = check_hidden("hidden", states, index.shape[1])
            logits = self._product(hidden) if self._takes(hidden, states) else index.logits(states)
            return _proven(index.proven_of(states, logits, wanted), hidden)
        found = index.topk(states, k, allowed=words, certify=True, complete=own)
        assert found.proven is not None
        if not own and not found.proven.all() and len(left := index.settle(states, found)):
            rows = hidden.reshape(-1, hidden.shape[-1])[torch.from_numpy(left)]
            exact = self._full(rows, found.values.shape[1])
            found.values[left], found.indices[left] = exact[0].float().numpy(), exact[1].numpy()
        return _proven(found, hidden)

    def log_prob(self, hidden: Tensor, targets: Tensor, *, allowed: Any = None) -> Tensor:
        """Return the log-probability of a word for each hidden state, float64 ``[...]``.

        Parameters
        ----------
        hidden
            As in :meth:`topk`.
        targets
            int64 ``[...]``, in the leading shape of `hidden`.
        allowed
            As in :meth:`topk`: the probabilities are among these words, and zero of any other.
        """
        return self.bounded_log_prob(hidden, targets, allowed=allowed)[0]

    def bounded_log_prob(
        self, hidden: Tensor, targets: Tensor, *, allowed: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of :meth:`log_prob`, of the same arguments, with proven bounds: estimate, low, high."""
        states = _states(hidden)
        if targets.shape != hidden.shape[:-1]:
            raise ValueError(f"targets: expected shape {list(hidden.shape[:-1])}, got {list(targets.shape)}")
        found = self.index.log_prob(states, targets.reshape(-1).numpy(), allowed=_arrays_of(allowed))
        return _bounded(found, targets.shape)

    def log_partition(self, hidden: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Return log Z, float64 ``[...]``, with proven bounds: estimate, low, high.

        Parameters
        ----------
        hidden
            As in :meth:`topk`.
        temperature
            Divides logits.
        """
        return _bounded(self.index.partition(_states(hidden), temperature=temperature), hidden.shape[:-1])

    def sample(
        self,
        hidden: Tensor,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        *,
        min_p: float | None = None,
        typical_p: float | None = None,
        epsilon_cutoff: float | None = None,
        eta_cutoff: float | None = None,
    ) -> Tensor:
        """Draw a word for each hidden state, as from a softmax of all logits in single precision.

        Words have the distribution of the full layer, whatever the codes know of it. A few hundred logits are exact,
        all others have proven bounds; a word drawn by its bound is kept with the probability exp(logit - bound). Where
        bounds leave open if a truncation keeps a word, logits of words drawn at random decide, with a chance of error
        of at most 10^-6 a decision. Each hidden state that stays open takes the full product, and so do all for
        `typical_p`, `eta_cutoff` or `epsilon_cutoff` behind `top_p`, and layers so small that it is faster;
        ``stats()["sampled_in_full"]`` counts these by cause. Besides `memory_bytes` a call holds at most about 3 MB of
        arrays, more for states that take the full product.

        Parameters
        ----------
        hidden
            As in :meth:`topk`.
        top_k
            Draw among so many of the likeliest words, proven to be these.
        top_p
            Draw among the likeliest words that together have this probability, of all words or of the `top_k`.
        temperature
            Divides logits.
        generator
            The source of randomness; torch's own if None.
        min_p, typical_p, epsilon_cutoff, eta_cutoff
            Other truncations, with the meaning and in the order that they have in transformers, behind `top_p`.

        Returns
        -------
        torch.Tensor
            int64 ``[...]``.
        """
        if top_k is not None:
            top_k = check_int("top_k", top_k, 1, self.index.shape[0], "words; None for all")
        rule = Truncation(temperature, top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff)
        states = check_hidden("hidden", _states(hidden), self.index.shape[1])
        sampler = Sampler(Layer(self.index, self._all_exact), rule, generator)
        words = sampler(states)
        self._sampled_in_full.update(sampler.full_rows)
        return torch.from_numpy(words).reshape(hidden.shape[:-1])

    def forward(self, hidden: Tensor) -> Tensor | SparseLogits:
        """Return the k largest logits in the dtype of `hidden`, laid out as `output` says.

        If torch records gradients of `hidden` or of the layer, this computes the full layer, and gradients flow through
        the returned logits, with ``"filled"`` through all. Call it under ``torch.no_grad()`` otherwise.
        ``torch.compile`` and ``torch.export`` keep it in their graphs as an operator, which calls this module: an
        exported program runs in the process that has it.

        Raises
        ------
        RuntimeError
            If torch records gradients and the given layer is not at hand: its rows lie on SSD, or its weight is
            computed from other parameters.
        """
        if torch.is_grad_enabled() and (hidden.requires_grad or self._trainable):
            return self._differentiable(hidden)
        is_traced = torch.compiler.is_compiling()
        if self.output == "filled":
            return operators.logits(hidden, self._number, self.index.shape[0]) if is_traced else self.all_logits(hidden)
        k = self.index.settings.k
        values, indices = operators.topk(hidden, self._number, k) if is_traced else self.topk(hidden)
        return self._laid_out(values.to(hidden.dtype), indices)

    def _differentiable(self, hidden: Tensor) -> Tensor | SparseLogits:
        """Compute the full layer and return its k largest logits, through which gradients flow."""
        if self._weight is None or self._computed:
            where = "its rows lie on SSD" if self._weight is None else "its weight is computed from other parameters"
            raise RuntimeError(
                f"gradients are recorded, but this decoder cannot give the layer's: {where}; call the layer itself, or "
                "the decoder under torch.no_grad()"
            )
        if not torch.compiler.is_compiling():
            states = _states(hidden)
            check_finite(check_hidden("hidden", states, self.index.shape[1]))
            self.rows_with_gradients += len(states)
        logits = nn.functional.linear(hidden.to(self._weight.dtype), self._weight, self._bias).to(hidden.dtype)
        if self.output == "filled":
            return logits
        return self._laid_out(*torch.topk(logits, self.index.settings.k))

    def _laid_out(self, values: Tensor, indices: Tensor) -> Tensor | SparseLogits:
        if self.output == "sparse":
            return SparseLogits(values, indices)
        logits = torch.full((*values.shape[:-1], self.index.shape[0]), -torch.inf, dtype=values.dtype)
        return logits.scatter_(-1, indices, values)

    def all_logits(self, hidden: Tensor) -> Tensor:
        """Return all logits in the dtype of `hidden`, ``[..., V]``: the build's k exact, the others one estimate.

        The others share the rest of Z evenly, so that a softmax gives the k largest their probabilities among all
        words.

        Parameters
        ----------
        hidden
            As in :meth:`topk`.
        """
        found, z = self.index.distribution(_states(hidden))
        words, k = self.index.shape[0], found.values.shape[1]
        left = -np.expm1(np.logaddexp.reduce(found.values, axis=1, dtype=np.float64) - z.estimate)
        with np.errstate(divide="ignore"):
            level = z.estimate + np.log(np.maximum(left, 1e-12)) - np.log(max(1, words - k))
        # All other words are below the words found.
        level = np.minimum(level, np.nextafter(found.values[:, -1], -np.inf, dtype=np.float32))
        logits = torch.from_numpy(level.astype(np.float32))[:, None].repeat(1, words)
        logits.scatter_(1, torch.from_numpy(found.indices), torch.from_numpy(found.values))
        return logits.to(hidden.dtype).reshape(*hidden.shape[:-1], words)

    def is_stale(self, lm_head: nn.Linear) -> bool:
        """Say if the hash of a layer differs from the indexed layer's; `lm_head` as in :meth:`from_linear`."""
        return self.index.is_stale(*_arrays(*_check_linear(lm_head)), dtype=_name(lm_head.weight))

    @shielded
    def refresh(self, lm_head: nn.Linear) -> int:
        """Take over a layer after training; return how many rows have changed; see :meth:`LogitIndex.refresh`."""
        weight, bias = _check_linear(lm_head)
        changed = self.index.refresh(*_arrays(weight, bias), dtype=_name(weight))
        self._share(lm_head.weight, getattr(lm_head, "bias", None))
        return changed

    def save(self, path: str | PathLike[str]) -> None:
        """Write the decoder, the layer's weights included, into the new directory `path` or to a URL."""
        self.index.save(path)

    @classmethod
    def open(
        cls, path: str | PathLike[str], *, dram: int | str | None = None, output: str = "dense", **options: Any
    ) -> Self:
        """Open a decoder that :meth:`save` wrote; `options` are those of :meth:`LogitIndex.open`."""
        _check_output(output)
        return cls._around(LogitIndex.open(path, dram=dram, **options), output)

    @classmethod
    def _around(cls, index: LogitIndex, output: str) -> Self:
        """Return a module over an opened index, which owns its rows if they lie in DRAM."""
        layer = index.layer
        weight = bias = None
        if layer is not None:
            rows = torch.from_numpy(layer.weight)
            weight = rows.view(torch.bfloat16) if layer.dtype == "bfloat16" else rows
            bias = torch.from_numpy(layer.bias).to(weight.dtype)
        return cls(index, weight, bias, output)

    def _share(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Keep a layer's numbers, but not as parameters of this module."""
        parts = [part for part in (weight, bias) if part is not None]
        trainable = any(part.requires_grad for part in parts)
        computed = any(not part.is_leaf for part in parts)  # such numbers would keep their sources
        weight, bias = (part.detach() if computed and part is not None else part for part in (weight, bias))
        self.__dict__.update(_weight=weight, _bias=bias, _computed=computed and trainable)

    @property
    def _trainable(self) -> bool:
        return self._computed or any(part is not None and part.requires_grad for part in (self._weight, self._bias))

    def _all(self, states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return all logits as the layer itself computes them, if it is at hand."""
        if self._weight is None:
            return self.index.logits(states)
        check_finite(states)
        return self._product(torch.from_numpy(np.ascontiguousarray(states)))

    def _product(self, hidden: Tensor) -> npt.NDArray[np.float32]:
        """Return the same of hidden states ``[..., D]`` as rows, in few calls, of numbers that are not checked."""
        weight = self._weight
        assert weight is not None
        if hidden.ndim != 2 or hidden.dtype != weight.dtype:
            hidden = hidden.reshape(-1, hidden.shape[-1]).to(weight.dtype)
        logits: npt.NDArray[np.float32] = _linear(hidden, weight, self._bias).detach().float().numpy()
        return logits

    def _takes(self, hidden: Tensor, states: npt.NDArray[np.float32]) -> bool:
        """Say if hidden states lose nothing in the dtype of the layer."""
        assert self._weight is not None
        dtype, given = self._weight.dtype, torch.from_numpy(states)
        return dtype in (torch.float32, hidden.dtype) or torch.equal(given.to(dtype).float(), given)

    def _all_exact(self, states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return all logits in single precision, whatever the layer's dtype."""
        wider = self._weight is None or self._weight.dtype != torch.float32
        return self.index.logits(states) if wider else self._all(states)

    def _full(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        assert self._weight is not None
        return _full(hidden, self._weight, self._bias, k)


@torch.no_grad()
def _full(hidden: Tensor, weight: Tensor, bias: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of the full product as the layer itself computes it."""
    values, indices = torch.topk(_linear(hidden.to(weight.dtype), weight, bias), k)
    return values, indices


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product in the layer's own dtype, also where autocast would compute it in another one."""
    if not torch.is_autocast_enabled("cpu"):
        return nn.functional.linear(hidden, weight, bias)
    with torch.autocast("cpu", enabled=False):
        return nn.functional.linear(hidden, weight, bias)


def _arrays_of(allowed: Any) -> Any:
    """Return allowed words of tensors as arrays; anything else as it is."""
    if isinstance(allowed, Tensor):
        return allowed.numpy()
    if isinstance(allowed, list | tuple):
        return [each.numpy() if isinstance(each, Tensor) else each for each in allowed]
    return allowed


def _shaped(found: TopK, hidden: Tensor) -> tuple[Tensor, Tensor]:
    if hidden.ndim == 2:
        return torch.from_numpy(found.values), torch.from_numpy(found.indices)
    shape = (*hidden.shape[:-1], found.values.shape[-1])
    return torch.from_numpy(found.values).reshape(shape), torch.from_numpy(found.indices).reshape(shape)


def _proven(found: TopK, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert found.proven is not None
    proven = torch.from_numpy(found.proven)
    return *_shaped(found, hidden), proven if hidden.ndim == 2 else proven.reshape(hidden.shape[:-1])


def _bounded(found: LogProb | Partition, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Return estimate, low and high as tensors of a shape."""
    estimate, low, high = map(torch.from_numpy, (found.estimate, found.low, found.high))
    return estimate.reshape(shape), low.reshape(shape), high.reshape(shape)


def _check_output(output: str) -> None:
    if output not in _FORMATS:
        raise ValueError(f"output={output!r}: expected one of {', '.join(_FORMATS)}")


def _check_linear(lm_head: nn.Linear) -> tuple[Tensor, Tensor | None]:
    weight = getattr(lm_head, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise TypeError(f"lm_head: expected a torch.nn.Linear, got {type(lm_head).__name__}")
    if weight.device.type != "cpu":
        raise ValueError(f"lm_head: its weight lies on {weight.device}; expected the CPU: lm_head.to('cpu')")
    _name(weight)
    bias = getattr(lm_head, "bias", None)
    return weight.detach(), None if bias is None else bias.detach()


def _name(weight: Tensor) -> str:
    names = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
    if weight.dtype not in names:
        raise TypeError(f"lm_head: expected weights of float32, float16 or bfloat16, got {weight.dtype}")
    return names[weight.dtype]


def _arrays(weight: Tensor, bias: Tensor | None) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
    """Return the layer's numbers without a copy of the weights; bfloat16 as uint16, which NumPy has."""
    rows = weight.view(torch.int16).numpy().view(np.uint16) if weight.dtype == torch.bfloat16 else weight.numpy()
    return rows, None if bias is None else bias.float().numpy()


def _states(hidden: Tensor, name: str = "hidden") -> npt.NDArray[np.float32]:
    """Return hidden states as rows of float32; float32 itself without a copy."""
    if isinstance(hidden, Tensor):
        try:
            # After a model's work each attribute of a tensor takes some percent of a call; an array has all at hand.
            usual: npt.NDArray[np.float32] = hidden.numpy()
            if usual.dtype is _FLOAT32 and usual.ndim == 2:
                return usual
        except (RuntimeError, TypeError):  # gradients, another device, or a dtype that NumPy lacks
            pass
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
        raise TypeError(f"{name}: expected a tensor of floats, got {_kind(hidden)}")
    if not hidden.ndim:
        raise ValueError(f"{name}: expected shape [..., D], got a single number")
    if hidden.device.type != "cpu":
        raise ValueError(f"{name} lies on {hidden.device}; expected the CPU")
    states: npt.NDArray[np.float32] = hidden.detach().reshape(-1, hidden.shape[-1]).float().numpy()
    return states


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}; torch.from_numpy makes one"
    return f"one of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__

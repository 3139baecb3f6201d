"""The steps of a call of ``generate``, from hidden states: processors of transformers without all logits.

Processors that change a word's score by itself alone are asked first with equal scores for all words: they show the
words that they change or rule out. The exact logits of these go through the processors; all other words keep the
layer's logits. Then a word is drawn, or the likeliest is found, and its score is the only one that is not minus
infinity.
"""

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from memhier.ann.decoder.layer import BIAS_ROUNDING, ROUNDING, Floats, Ints, least_error, norm_rounding
from memhier.ann.decoder.module.decoder import TopKSoftmax
from memhier.ann.decoder.module.generation import Need
from memhier.ann.decoder.module.outcome import Change
from memhier.ann.decoder.module.sampling import HEAD_WORDS, Known, Layer, Sampler
from memhier.ann.decoder.module.truncation import Truncation, drawn_of, shares_of

__all__ = ["StepScores", "Steps", "steps_of"]

Doubles: TypeAlias = npt.NDArray[np.float64]

_BY_WORD = frozenset(
    f"{name}LogitsProcessor"
    for name in (
        "EncoderNoRepeatNGram", "EncoderRepetitionPenalty", "ForcedBOSToken", "ForcedEOSToken", "InfNanRemove",
        "MinLength", "MinNewTokensLength", "NoBadWords", "NoRepeatNGram", "PrefixConstrained", "RepetitionPenalty",
        "SequenceBias", "SuppressTokens", "SuppressTokensAtBegin",
    )
) | {"ExponentialDecayLengthPenalty"}  # fmt: skip
_RULING = "PrefixConstrainedLogitsProcessor"  # rules words out and asks the user's function: once a step
_FORCING = ("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor")
_TRUNCATIONS = {
    "TemperatureLogitsWarper": ("temperature", "temperature"), "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"), "MinPLogitsWarper": ("min_p", "min_p"),
    "TypicalLogitsWarper": ("mass", "typical_p"), "EpsilonLogitsWarper": ("epsilon", "epsilon_cutoff"),
    "EtaLogitsWarper": ("epsilon", "eta_cutoff"),
}  # fmt: skip
_IN_ORDER = tuple(name for _, name in _TRUNCATIONS.values())
_SAME = 1.234567  # a score for all words, that no processor leaves by chance
_OUT = -1e30  # scores below it are ruled out
_LISTED = 4096  # words whose exact logits are computed at once


@dataclass(frozen=True, slots=True)
class Steps:
    """The processors of a call.

    Attributes
    ----------
    by_word
        Those that change scores word by word.
    rule
        The truncation that follows; None for the likeliest word.
    """

    by_word: tuple[Any, ...]
    rule: Truncation | None


class Accelerated(Protocol):
    """The layer of an accelerated model."""

    head: nn.Linear
    decoder: TopKSoftmax
    change: Change | None

    def count(self, rows: int, reason: str) -> None:
        """Count rows that took the full layer."""


def steps_of(processors: Any, *, samples: bool) -> Steps | str:
    """Return the steps of a list of processors, or the name of the first that is not understood."""
    by_word: list[Any] = []
    numbers: dict[str, Any] = {}
    for each in processors:
        name = type(each).__name__
        if type(each).__module__.split(".")[0] != "transformers":
            return name
        if name in _BY_WORD and not numbers:
            by_word.append(each)
        elif name in _TRUNCATIONS:
            source, target = _TRUNCATIONS[name]
            in_order = all(_IN_ORDER.index(other) < _IN_ORDER.index(target) for other in numbers)
            if not in_order or getattr(each, "min_tokens_to_keep", 1) != 1:
                return name
            numbers[target] = getattr(each, source)
        elif name != "LogitNormalization":
            return name
    if not samples:
        return next((type(each).__name__ for each in processors if numbers), "") or Steps(tuple(by_word), None)
    try:
        return Steps(tuple(by_word), _rule_of(numbers))
    except ValueError:
        return "a truncation at its limit"


def _rule_of(numbers: dict[str, Any]) -> Truncation:
    plain: dict[str, Any] = {name: int(value) if name == "top_k" else float(value) for name, value in numbers.items()}
    return Truncation(**{name: value for name, value in plain.items() if not (name == "min_p" and value == 0)})


class StepScores:
    """Stands for a list of processors; given no logits it finds the word of each state of its own accord.

    Parameters
    ----------
    head
        The layer.
    need
        The needs of the call; the layer leaves hidden states there.
    processors
        The list, for steps whose logits are at hand.
    """

    def __init__(self, head: Accelerated, need: Need, processors: Any, steps: Steps) -> None:
        self._head, self._need, self._processors, self._steps = head, need, processors, steps
        self._dtype = head.head.weight.dtype

    @property
    def _rounding(self) -> float:
        return ROUNDING[self._name]

    @property
    def _name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores as the processors do, or those of one word each."""
        hidden, self._need.hidden = self._need.hidden, None
        if hidden is None:
            return self._processed(input_ids, scores)
        if len(hidden) != len(scores):
            raise RuntimeError(f"{len(scores)} texts, but the output layer saw {len(hidden)} hidden states")
        states = hidden.float().numpy()
        changed, out = self._touched(input_ids, len(hidden), scores.shape[1])
        if out.all(1).any():  # the model's own processors decide for a text without a word
            self._head.count(len(hidden), "no word left")
            return self._processed(input_ids, torch.from_numpy(self._all(states)))
        words = self._words(input_ids, states, changed, out)
        chosen = torch.full(scores.shape, -torch.inf, dtype=scores.dtype)
        return chosen.scatter_(1, torch.from_numpy(words)[:, None], 0.0)

    def _processed(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        found: Tensor = self._processors(input_ids, scores)
        return found

    def _words(
        self, input_ids: Tensor, states: Floats, changed: npt.NDArray[np.bool_], out: npt.NDArray[np.bool_]
    ) -> Ints:
        words = out.shape[1]
        rule, most = self._steps.rule, int((changed | out).sum(1).max())
        if most <= min(_LISTED, words // 4):
            known = self._known(input_ids, states, changed, out)
            return self._greedy(input_ids, states, known) if rule is None else self._sampled(states, known, rule)
        if int((~out).sum(1).max()) <= _LISTED:  # few are left: each gets its logit
            listed = self._known(input_ids, states, ~out, np.zeros_like(out))
            shares = shares_of(listed.logits, rule or Truncation(top_k=1))
            uniform = torch.rand(len(states), dtype=torch.float64).numpy()
            return drawn_of(listed.words, shares, uniform if rule is not None else np.zeros(len(states)))
        self._head.count(len(states), "many words changed")
        scores = self._in_full(input_ids, states)
        if rule is None:
            likeliest: Ints = np.argmax(scores, 1)
            return likeliest
        uniform = torch.rand(len(states), dtype=torch.float64).numpy()
        return drawn_of(np.broadcast_to(np.arange(words), scores.shape), shares_of(scores, rule), uniform)

    def _touched(self, input_ids: Tensor, rows: int, words: int) -> tuple[npt.NDArray[np.bool_], ...]:
        """Return the words that processors change, and those that they rule out, bool ``[n, V]`` each."""
        changed, out = torch.zeros(rows, words, dtype=torch.bool), torch.zeros(rows, words, dtype=torch.bool)
        for each in self._steps.by_word:
            same = torch.full((rows, words), _SAME, dtype=torch.float32)
            scores = each(input_ids, same.clone())
            changed |= scores != same
            ruled = scores < _OUT
            # A forced word comes back, whatever the processors before it have ruled out.
            out = ruled if type(each).__name__ in _FORCING and ruled.any() else out | ruled
        return (changed & ~out).numpy(), out.numpy()

    def _known(
        self, input_ids: Tensor, states: Floats, changed: npt.NDArray[np.bool_], out: npt.NDArray[np.bool_]
    ) -> Known:
        """Return the scores of words that are changed or out."""
        words, rules = _listed(changed | out), _listed(changed)
        logits = np.full(words.shape, -np.inf)
        if rules.shape[1]:
            exact = self._finish(self._head.decoder.index.logits_of(states, np.maximum(rules, 0)))
            dense = torch.full(changed.shape, _SAME, dtype=torch.float32)
            state, column = np.nonzero(rules >= 0)
            dense[state, rules[state, column]] = torch.from_numpy(exact[state, column]).float()
            for each in self._steps.by_word:
                if type(each).__name__ != _RULING:
                    dense = each(input_ids, dense)
            scores = np.take_along_axis(dense.double().numpy(), np.maximum(words, 0), 1)
            kept = np.take_along_axis(changed, np.maximum(words, 0), 1) & (words >= 0) & (scores > _OUT)
            logits = np.where(kept, scores, -np.inf)
        return Known(words, logits)

    def _layer(self) -> Layer:
        change = self._head.change
        assert change is not None
        return Layer(self._head.decoder.index, self._all, self._finish, change.shape, self._rounding)

    def _sampled(self, states: Floats, known: Known, rule: Truncation) -> Ints:
        sampler = Sampler(self._layer(), rule)
        words = sampler(states, known)
        for cause, rows in sampler.full_rows.items():
            self._head.count(rows, cause)
        return words

    def _greedy(self, input_ids: Tensor, states: Floats, known: Known) -> Ints:
        """Return the likeliest words; states in doubt by rounding, too, take the full layer."""
        layer = self._layer()
        found = layer.index.envelope(states, HEAD_WORDS, layer.shape, out=known.words)
        words = np.concatenate([found.rows, known.words], 1)
        scores = np.concatenate([self._finish(found.logits).astype(np.float64), known.logits], 1)
        scores[words < 0] = -np.inf
        order = np.argsort(-scores, axis=1)[:, :2]
        best = np.take_along_axis(scores, order, 1)
        norms = np.linalg.norm(states.astype(np.float64), axis=1) * layer.index.largest_norm
        doubt = 2 * layer.shape.inverse * norm_rounding(states.shape[1]) * norms
        doubt += 4 * (self._rounding + BIAS_ROUNDING) * np.abs(best[:, 0])
        doubt += 4 * least_error(self._name, states.shape[1])
        sure = best[:, 0] - np.maximum(best[:, 1], found.cut * layer.shape.inverse) > doubt
        answer: Ints = np.take_along_axis(words, order, 1)[:, 0]
        if not sure.all():
            self._head.count(int((~sure).sum()), "not proven")
            answer[~sure] = np.argmax(self._in_full(input_ids, states, ~sure), 1)[~sure]
        return answer

    def _in_full(self, input_ids: Tensor, states: Floats, rows: npt.NDArray[np.bool_] | None = None) -> Doubles:
        """Return the scores of all words as the processors leave them; zero logits for other rows."""
        some = np.ones(len(states), bool) if rows is None else rows
        scores = torch.zeros(len(states), self._head.head.weight.shape[0], dtype=torch.float32)
        scores[torch.from_numpy(some)] = torch.from_numpy(self._all(states[some]))
        for each in self._steps.by_word:
            scores = each(input_ids, scores)
        found: Doubles = scores.double().numpy()
        return found

    def _all(self, states: Floats) -> Floats:
        """Return the model's logits, as the layer computes them."""
        logits = self._head.head(torch.from_numpy(np.ascontiguousarray(states)).to(self._dtype))
        return self._changed(logits)

    def _finish(self, logits: Floats) -> Floats:
        return self._changed(torch.from_numpy(np.ascontiguousarray(logits)).to(self._dtype))

    def _changed(self, logits: Tensor) -> Floats:
        change = self._head.change
        assert change is not None
        found: Floats = change(logits).float().numpy()
        return found


def _listed(marked: npt.NDArray[np.bool_]) -> Ints:
    """Return the marked words of each state, int64 ``[n, c]``; -1 where there are fewer."""
    counts = marked.sum(1)
    words = np.full((len(marked), int(counts.max(initial=0))), -1, np.int64)
    words[np.arange(words.shape[1]) < counts[:, None]] = np.nonzero(marked)[1]
    return words

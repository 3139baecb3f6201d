"""The needs of a call of ``generate``, decided by a list of options that are known to be safe.

Greedy decoding takes the largest logit, sampling among `top_k` words takes the `top_k` largest, beams take the largest
and log Z. Of other options some are left to :mod:`memhier.ann.decoder.module.steps`, which looks at the processors of
the call itself. An option that is not known takes the full layer, and its name is the reason.
"""

import inspect
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Logits", "Need", "need_of", "needed_of", "writing"]

Logits: TypeAlias = Literal["largest", "proven", "filled", "full"]

# Options that do not change the choice of a word by its scores, or that the code below looks at by name.
_KNOWN = frozenset((
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cache_config", "compile_config",
    "decoder_start_token_id", "disable_compile", "do_sample", "early_stopping", "eos_token_id", "epsilon_cutoff",
    "eta_cutoff", "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_cache_len", "max_length",
    "max_new_tokens", "max_time", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "pad_token_id", "prefill_chunk_size",
    "remove_invalid_values", "renormalize_logits", "repetition_penalty", "return_dict_in_generate", "stop_strings",
    "suppress_tokens", "temperature", "top_k", "top_p", "transformers_version", "typical_p", "use_cache",
))  # fmt: skip
# Options that may raise words, one by one: processors that the steps of a call understand.
_RAISING = (
    "sequence_bias", "exponential_decay_length_penalty", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size",
)  # fmt: skip
_ASSISTED = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
# Values of other options that do nothing, besides None, False and the values of a fresh configuration.
_IDLE: dict[str, tuple[object, ...]] = {
    "assistant_confidence_threshold": (0.4,), "assistant_lookbehind": (10,), "diversity_penalty": (0.0,),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1.0,), "guidance_scale": (1,),
    "num_assistant_tokens": (20,), "num_assistant_tokens_schedule": ("constant",), "num_beam_groups": (1,),
    "target_lookbehind": (10,), "cache_implementation": ("dynamic", "static", "offloaded", "quantized", "hybrid"),
}  # fmt: skip
_INPUTS = ("attention_mask", "decoder_attention_mask", "decoder_input_ids", "encoder_outputs", "input_ids", "tokenizer")
_GIVEN = ("self", "inputs", "generation_config", "prefix_allowed_tokens_fn", "assistant_model")
_CRITERIA = frozenset(("EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria"))
_STREAMERS = frozenset(("TextStreamer", "TextIteratorStreamer", "AsyncTextIteratorStreamer"))
_OF_GENERATION = ("generate", "_sample", "_beam_search", "_get_logits_processor", "_prepare_generation_config")


@dataclass(slots=True)
class Need:
    """The needs of one call of ``generate``, step after step.

    Parameters
    ----------
    logits
        ``"largest"``: the largest logits; ``"proven"``: the largest, proven for each state; ``"filled"``: the largest
        and log Z; ``"full"``: all.
    reason
        The option that asks for the full layer.
    words
        How many of the largest logits the first step needs.
    grows
        Whether each step needs one more, since its text may rule out one more word.
    may_wait
        Whether the processors of the call may look at hidden states in the place of all logits.
    waits
        Whether they do: where the largest logits are not enough, the layer leaves its hidden states here.
    hidden
        These, ``[n, D]``; None if the layer gave logits.
    beams
        Whether the call's processors prove the choices of beams from hidden states.
    """

    logits: Logits
    reason: str = ""
    words: int = 1
    grows: bool = False
    may_wait: bool = False
    waits: bool = False
    hidden: Any = None
    beams: bool = False

    def step(self) -> int:
        """Return how many of the largest logits this step needs."""
        words = self.words
        self.words += self.grows
        return words


_NEEDED: ContextVar[tuple[object, Need] | None] = ContextVar("memhier_needed_of", default=None)


def needed_of(head: object) -> Need | None:
    """Return the needs of the call of ``generate`` on this output layer that is under way in this thread, or None."""
    needed = _NEEDED.get()
    return needed[1] if needed is not None and needed[0] is head else None


@contextmanager
def writing(head: object, need: Need) -> "Iterator[None]":
    """Set the needs of a call of ``generate`` on this output layer, in this thread and within the block."""
    token = _NEEDED.set((head, need))
    try:
        yield
    finally:
        _NEEDED.reset(token)


def need_of(model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Need:
    """Return the needs of ``model.generate(*arguments, **options)``."""
    if not _writes_as_usual(model):
        return Need("full", "generate of the model's own")
    try:
        call = dict(inspect.signature(type(model).generate).bind(model, *arguments, **options).arguments)
    except TypeError:  # generate has the better message
        return Need("full", "unknown arguments")
    more = call.pop("kwargs", {})
    unknown = _unknown_argument(call)
    if unknown is None:
        settings = _Settings(model, call.get("generation_config"), more)
        unknown = settings.unknown or _unknown_input(model, settings, more)
    if unknown is not None:
        return Need("full", unknown)
    need = _decided(settings, call | more)
    raising = next((name for name in ("prefix_allowed_tokens_fn",) if call.get(name) is not None), settings.raising)
    if raising is not None:
        need.logits, need.reason = "full", raising
    assisted = call.get("assistant_model") is not None or any(settings(name) for name in _ASSISTED)
    if assisted and need.grows:
        return Need("full", "a text that grows by more than a word")
    need.may_wait = not assisted and (settings("num_beams") or 1) == 1
    return need


def _writes_as_usual(model: Any) -> bool:
    """Say whether the model's methods that choose words are those of transformers."""
    usual = next((each for each in type(model).__mro__ if each.__name__ == "GenerationMixin"), None)
    if usual is None or usual.__module__.split(".")[0] != "transformers" or model.generation_config is None:
        return False
    missing = object()
    return all(
        getattr(type(model), name, missing) is getattr(usual, name, missing)
        and (name == "generate" or _is_ours(vars(model).get(name)))
        for name in _OF_GENERATION
    )


def _is_ours(method: Any) -> bool:
    function = getattr(method, "func", None)
    return method is None or str(getattr(function, "__module__", "")).startswith("memhier.")


def _unknown_argument(call: dict[str, Any]) -> str | None:
    """Return the name of the first argument of ``generate`` that may look at scores, or None."""
    for name, value in call.items():
        if value is None or value is False or name in _GIVEN:
            continue
        if name in ("logits_processor", "stopping_criteria") and not len(value):
            continue
        if name == "stopping_criteria" and all(_is_usual(each, _CRITERIA) for each in value):
            continue
        if name == "streamer" and _is_usual(value, _STREAMERS):
            continue
        return name
    return None


def _is_usual(value: object, names: frozenset[str]) -> bool:
    return type(value).__name__ in names and type(value).__module__.split(".")[0] == "transformers"


def _unknown_input(model: Any, settings: "_Settings", more: dict[str, Any]) -> str | None:
    """Return the name of the first keyword that is neither an option nor an input of the model, or None."""
    known = (*_INPUTS, *inspect.signature(model.forward).parameters)
    return next(
        (name for name in more if name not in known and not settings.has(name) and more[name] is not None), None
    )


class _Settings:
    """The options of a call: its own come first, then its configuration's, then the model's."""

    def __init__(self, model: Any, config: Any, more: dict[str, Any]) -> None:
        self._more, self._configs = more, [each for each in (config, model.generation_config) if each is not None]
        fresh = type(model.generation_config)()
        self._names = {name for each in (fresh, *self._configs) for name in vars(each) if not name.startswith("_")}
        others = (name for name in sorted(self._names - _KNOWN) if not self._is_idle(name, fresh))
        unknown = [name for name in others if name not in _ASSISTED]
        self.raising: str | None = next((name for name in unknown if name in _RAISING), None)
        self.unknown: str | None = next((name for name in unknown if name not in _RAISING), None)

    def has(self, name: str) -> bool:
        """Say whether it is an option."""
        return name in self._names

    def __call__(self, name: str, default: Any = None) -> Any:
        """Return the value of an option, or the default if nothing sets it."""
        if name in self._more:
            return self._more[name]  # None, too: it turns off an option of a configuration
        values = (getattr(each, name, None) for each in self._configs)
        return next((value for value in values if value is not None), default)

    def _is_idle(self, name: str, fresh: Any) -> bool:
        value = self(name)
        idle = (None, False, getattr(fresh, name, None), *_IDLE.get(name, ()))
        return any(value is each or (type(value) is type(each) and value == each) for each in idle) or (
            isinstance(value, int | float) and value in _IDLE.get(name, ())
        )


def _decided(option: _Settings, given: dict[str, Any]) -> Need:
    penalty = option("repetition_penalty") or 1.0
    if penalty < 1:
        return Need("full", "repetition_penalty")
    grows = penalty > 1 or (option("no_repeat_ngram_size") or 0) > 0
    lowered, ends = _lowered(option)
    if grows:
        lowered += _length(given)
    beams = option("num_beams") or 1
    if beams > 1:
        for name in ("do_sample", "renormalize_logits"):
            if option(name):
                return Need("full", f"num_beams and {name}")
        return Need("filled", words=max(2, 1 + ends) * beams + lowered, grows=grows)
    if not option("do_sample"):
        return Need("largest", words=1 + lowered, grows=grows)
    most = option("top_k", 50)
    if not most:
        return Need("full", "top_k")
    return Need("proven", words=most + lowered, grows=grows)


def _lowered(option: _Settings) -> tuple[int, int]:
    """Return how many words the options may rule out at a step, for any text, and how many words end a text."""
    ends = _count(option("eos_token_id"))
    lowered = sum(_count(option(name)) for name in ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"))
    if option("min_length") or option("min_new_tokens"):
        lowered += ends
    return lowered, ends


def _count(words: Any) -> int:
    if words is None:
        return 0
    single = not hasattr(words, "__len__") or getattr(words, "ndim", None) == 0
    return 1 if single else len(words)


def _length(given: dict[str, Any]) -> int:
    """Return the most words of the given texts, and one for the word that begins a text."""
    names = ("inputs", "input_ids", "decoder_input_ids")
    shapes: list[tuple[int, ...]] = [getattr(given.get(name), "shape", ()) for name in names]
    return 1 + sum(int(shape[-1]) for shape in shapes if len(shape))

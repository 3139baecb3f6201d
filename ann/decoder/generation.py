"""What a call of ``generate`` needs of the output layer: only which words are largest, or all probabilities.

Greedy decoding takes the largest logit; sampling among as many words as are exact normalises over these alone. Beams,
top-p over all words and whoever asks for scores need log Z, which takes a scan of all codes.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["needs_ranks_alone", "ranks_alone", "ranks_are_enough"]

# The output layer of the model that writes in this thread: whoever asks another one meanwhile needs all of its answer.
_ENOUGH_OF: ContextVar[object] = ContextVar("memhier_ranks_are_enough_of", default=None)

# Each makes `generate` look at more than the largest logits, or lets the caller do so.
_LOOKS_AT_ALL = (
    "output_scores", "output_logits", "logits_processor", "assistant_model", "penalty_alpha", "guidance_scale",
    "prompt_lookup_num_tokens", "dola_layers", "custom_generate", "constraints", "force_words_ids",
    "watermarking_config", "sequence_bias", "prefix_allowed_tokens_fn", "top_h", "exponential_decay_length_penalty",
)  # fmt: skip


def ranks_are_enough(head: object) -> bool:
    """Say whether whoever asks this output layer now needs the largest logits alone."""
    return _ENOUGH_OF.get() is head


@contextmanager
def ranks_alone(head: object | None) -> "Iterator[None]":
    """Let it be said of one output layer, or of none, for calls made within, in this thread."""
    token = _ENOUGH_OF.set(head)
    try:
        yield
    finally:
        _ENOUGH_OF.reset(token)


def needs_ranks_alone(model: Any, k: int, config: Any, options: dict[str, Any]) -> bool:
    """Say whether ``generate`` with these options needs no more than the k largest logits.

    Parameters
    ----------
    config, options
        Its `generation_config` or None, and its keyword arguments, which come first. What neither sets is as the
        model's own `generation_config` says.
    """

    def option(name: str, default: Any = None) -> Any:
        if name in options:
            return options[name]  # None, too: it turns off what a config sets
        values = (getattr(each, name, None) for each in (config, model.generation_config))
        return next((value for value in values if value is not None), default)

    if any(option(name) for name in _LOOKS_AT_ALL) or (option("num_beams") or 1) > 1:
        return False
    return not option("do_sample") or 0 < (option("top_k", 50) or 0) <= k

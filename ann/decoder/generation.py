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

_ENOUGH: ContextVar[bool] = ContextVar("memhier_ranks_are_enough", default=False)

# Each makes `generate` look at more than the largest logits, or lets the caller do so.
_LOOKS_AT_ALL = (
    "output_scores", "output_logits", "logits_processor", "assistant_model", "penalty_alpha", "guidance_scale",
    "prompt_lookup_num_tokens", "dola_layers", "custom_generate", "constraints", "force_words_ids",
    "watermarking_config", "sequence_bias", "prefix_allowed_tokens_fn", "top_h",
)  # fmt: skip


def ranks_are_enough() -> bool:
    """Say whether whoever asks now needs the largest logits alone."""
    return _ENOUGH.get()


@contextmanager
def ranks_alone(enough: bool) -> "Iterator[None]":
    """Let it be said for calls made within, in this thread."""
    token = _ENOUGH.set(enough)
    try:
        yield
    finally:
        _ENOUGH.reset(token)


def needs_ranks_alone(model: Any, k: int, config: Any, options: dict[str, Any]) -> bool:
    """Say whether ``generate`` with these options needs no more than the k largest logits.

    Parameters
    ----------
    config, options
        Its `generation_config`, None for the model's, and its keyword arguments, which come first.
    """
    config = model.generation_config if config is None else config

    def option(name: str, default: Any = None) -> Any:
        value = options.get(name)
        value = getattr(config, name, None) if value is None else value
        return default if value is None else value

    if any(option(name) for name in _LOOKS_AT_ALL) or option("num_beams", 1) > 1:
        return False
    return not option("do_sample", False) or 0 < option("top_k", 50) <= k

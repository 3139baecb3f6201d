"""TorchRec's tensors, for batches that come as TorchRec's: memhier needs no TorchRec by itself."""

import math
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from memhier.recsys.embedding.initial import Uniform

__all__ = ["check_keyed_jagged", "initial_of_torchrec", "is_of_torchrec", "jagged_tensor", "keyed_tensor"]

_MODULE = "torchrec.sparse.jagged_tensor"


def is_of_torchrec(features: Any) -> bool:
    """Whether a batch is a KeyedJaggedTensor of TorchRec, so that results are to be TorchRec's, too."""
    return type(features).__module__ == _MODULE


def keyed_tensor(names: Sequence[str], widths: Sequence[int], values: Tensor) -> Any:
    """Return a KeyedTensor."""
    return import_module(_MODULE).KeyedTensor(keys=list(names), length_per_key=list(widths), values=values)


def jagged_tensor(values: Tensor, lengths: Tensor) -> Any:
    """Return a JaggedTensor."""
    return import_module(_MODULE).JaggedTensor(values=values, lengths=lengths)


def initial_of_torchrec(config: Any) -> Uniform:
    """Return the first values that a configuration of TorchRec's asks for, or the default of any other.

    Raises
    ------
    ValueError
        If they are not uniform, or rows are not float32.
    """
    name = getattr(config, "name", "")
    data_type = getattr(getattr(config, "data_type", None), "value", "FP32")
    if data_type != "FP32":
        raise ValueError(f"tables: {name!r} has data_type={data_type!r}; rows here are float32, see codec=")
    made = getattr(config, "init_fn", None)
    if made is None:
        return Uniform()
    is_uniform = isinstance(made, partial) and made.func is nn.init.uniform_ and not made.args
    if not is_uniform or {*made.keywords} != {"a", "b"}:
        raise ValueError(
            f"tables: {name!r} has an init_fn; first values come from a seed and the row alone: use the configurations "
            "of memhier.recsys with initial=Normal(...) or Uniform(...)"
        )
    low, high = made.keywords["a"], made.keywords["b"]
    bound = math.sqrt(1 / config.num_embeddings)
    return Uniform() if (low, high) == (-bound, bound) else Uniform(low, high)


def check_keyed_jagged(features: Any) -> None:
    """Raise ValueError for a KeyedJaggedTensor whose keys have batches of different sizes."""
    if is_of_torchrec(features) and (
        features.variable_stride_per_key() or features.inverse_indices_or_none() is not None
    ):
        raise ValueError(
            "features: a KeyedJaggedTensor with a batch size of its own for each key, or with inverse_indices; "
            "expected one with the samples of the batch for every key"
        )

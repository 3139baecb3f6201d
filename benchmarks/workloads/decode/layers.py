"""Trained output layers with real hidden states, from the data sets beside the checkout."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.benchmarks.datasets import data_set_folder
from memhier.io.outside import reading

__all__ = ["TrainedLayer", "load_domains"]

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """An output layer, contexts to learn from, and contexts to be answered.

    Attributes
    ----------
    weight, bias
        float32 ``[V, D]`` and ``[V]``.
    learned, asked
        float32 ``[n, D]``.
    """

    weight: Floats
    bias: Floats
    learned: Floats
    asked: Floats


def load_domains(learned: tuple[str, ...], asked: tuple[str, ...], words: int | None = None) -> TrainedLayer:
    """Return the layer of 50,000 words with contexts of its two domains, ``wikitext`` and ``books``.

    Parameters
    ----------
    learned, asked
        Which domains contexts to learn from and to be answered come from; held out from each other.
    words
        Only the first, which are the most frequent.

    Raises
    ------
    FileNotFoundError
        When the data set is missing.
    """
    folder = data_set_folder("lm-softmax-50k")

    def contexts(kind: str, domains: tuple[str, ...]) -> Floats:
        return np.concatenate([load(f"{kind}_{name}_f16") for name in domains]).astype(np.float32)

    def load(name: str) -> npt.NDArray[Any]:
        path = folder / f"{name}.npy"
        with reading(path):
            found: npt.NDArray[Any] = np.load(path)
            return found

    return TrainedLayer(
        load("weight_f16")[:words].astype(np.float32),
        load("bias_f32")[:words],
        contexts("calibration", learned),
        contexts("contexts", asked),
    )

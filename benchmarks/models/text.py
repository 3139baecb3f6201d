"""Text to train on: Brown and Penn Treebank as one stream of words, in order of their frequency."""

import re
import zipfile
from collections import Counter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.benchmarks.datasets import data_set_folder

__all__ = ["read_words"]

Ints: TypeAlias = npt.NDArray[np.int64]


def read_words(least: int = 50_000) -> tuple[Ints, int]:
    """Return the text as numbers of words, the most frequent first, and how many there are.

    Raises
    ------
    FileNotFoundError
        When a data set is missing.
    ValueError
        When the text has fewer than `least` words.
    """
    text = [*_brown(), *_treebank()]
    counts = Counter(text).most_common()
    if len(counts) < least:
        raise ValueError(f"the text has {len(counts)} words: expected at least {least}")
    number = {word: i for i, (word, _) in enumerate(counts)}
    return np.array([number[word] for word in text], np.int64), len(counts)


def _brown() -> list[str]:
    """Words of Brown as they are written; its files are ``word/tag``."""
    words: list[str] = []
    with zipfile.ZipFile(data_set_folder("brown") / "brown.zip") as file:
        for name in sorted(file.namelist()):
            if re.fullmatch(r"brown/c[a-r]\d\d", name):
                words += [token.rpartition("/")[0] for token in file.read(name).decode().split()]
    return words


def _treebank() -> list[str]:
    with zipfile.ZipFile(data_set_folder("ptb") / "ptb.zip") as file:
        return file.read("ptb.train.txt").decode().replace("\n", "<eos>").split()

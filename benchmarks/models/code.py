"""Python sources of the machine as a stream of words: identifiers, numbers and signs, in order of their frequency."""

import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["read_sources"]

Ints: TypeAlias = npt.NDArray[np.int64]

_WORD = re.compile(r"[A-Za-z_]\w*|\d+|[^\w\s]")


def read_sources(words: int, seed: int = 0, folders: tuple[Path, ...] = ()) -> Ints:
    """Return sources as numbers of words, the most frequent first: as many files, in random order, as have `words`.

    Parameters
    ----------
    folders
        Where to look, in place of this Python's own modules and those installed.

    Raises
    ------
    ValueError
        When all sources there have fewer.
    """
    paths = folders or tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    files = sorted({file for path in paths for file in path.rglob("*.py")})
    counts: Counter[str] = Counter()
    texts: list[list[str]] = []
    for place in np.random.default_rng(seed).permutation(len(files)).tolist():
        text = _WORD.findall(files[place].read_text(errors="ignore"))
        counts.update(text)
        texts.append(text)
        if len(counts) >= words:
            break
    else:
        raise ValueError(f"{len(files)} files of Python sources have {len(counts)} words: expected at least {words}")
    number = {word: i for i, (word, _) in enumerate(counts.most_common(words))}
    return np.fromiter((number[word] for text in texts for word in text if word in number), np.int64)

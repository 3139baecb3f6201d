"""Sentence pairs from text files, and vocabularies of whole words."""

import gzip
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from memhier.benchmarks.datasets import data_set_folder
from memhier.io.outside import reading

__all__ = [
    "BEGIN",
    "END",
    "PAD",
    "SPECIALS",
    "UNKNOWN",
    "Corpus",
    "Pairs",
    "Vocabulary",
    "generated",
    "load",
    "read_pairs",
]

PAD, BEGIN, END, UNKNOWN = range(4)
SPECIALS = ("<pad>", "<begin>", "<end>", "<unknown>")
LONGEST = 60  # words of a sentence to learn from

# A word may hold hyphens and apostrophes; every other mark is a word of its own.
_WORD = re.compile(r"\w+(?:[-'\u2019]\w+)*|[^\w\s]")
_OPENING, _CLOSING = frozenset("([{„"), frozenset(".,;:!?)]}%“")

Pairs: TypeAlias = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Pairs of a sentence and its translation: to learn from, and held out."""

    name: str
    train: Pairs
    test: Pairs


class Vocabulary:
    """The words of a text by descending frequency, after four special ones.

    Parameters
    ----------
    sentences
        The text.
    most
        How many words to keep, the special ones included.
    """

    def __init__(self, sentences: Iterable[str], most: int) -> None:
        counts = Counter(word for sentence in sentences for word in _WORD.findall(sentence))
        ordered = sorted(counts, key=lambda word: (-counts[word], word))[: most - len(SPECIALS)]
        self.words: list[str] = [*SPECIALS, *ordered]
        self.counts: list[int] = [0] * len(SPECIALS) + [counts[word] for word in ordered]
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, sentence: str) -> list[int]:
        """Return the numbers of a sentence's words."""
        return [self._numbers.get(word, UNKNOWN) for word in _WORD.findall(sentence)]

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the sentence of words, up to the first end."""
        text = ""
        for number in numbers:
            if number == END:
                break
            word = self.words[number]
            glued = not text or word in _CLOSING or text[-1] in _OPENING
            text += word if glued else f" {word}"
        return text


def read_pairs(source: Path, target: Path | None = None) -> Pairs:
    """Return the sentence pairs of a file with a tab in each line, or of two files with a sentence in each line.

    Files may be compressed (``.gz``). Pairs with an empty side are left out.

    Raises
    ------
    ValueError
        When a line has no tab, or the two files differ in length.
    """
    lines = _lines(source)
    if target is None:
        parts = [line.split("\t") for line in lines]
        short = next((number for number, part in enumerate(parts, 1) if len(part) < 2), None)
        if short is not None:
            raise ValueError(f"{source}, line {short}: expected a sentence, a tab and its translation")
        pairs = [(part[0], part[1]) for part in parts]
    else:
        others = _lines(target)
        if len(lines) != len(others):
            raise ValueError(f"{source} has {len(lines):,} lines, {target} {len(others):,}: expected as many in both")
        pairs = list(zip(lines, others, strict=True))
    return [(first, second) for first, second in pairs if first.strip() and second.strip()]


def _lines(path: Path) -> list[str]:
    with reading(path, "lines of text in UTF-8"):
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode().splitlines()


def load(source: Path | None = None, target: Path | None = None, held_out: int = 1000) -> Corpus:
    """Return the corpus of the files given, or Multi30k from English to German.

    Of the files given, pairs at equal distances are held out.

    Raises
    ------
    FileNotFoundError
        When a file, or the data set, is missing.
    """
    if source is not None:
        pairs = read_pairs(source, target)
        if len(pairs) <= held_out:
            raise ValueError(f"{source}: {len(pairs):,} pairs: expected more than the {held_out:,} that are held out")
        test = np.linspace(0, len(pairs), held_out, endpoint=False).astype(np.int64).tolist()
        out = set(test)
        return Corpus(
            source.name,
            [pair for number, pair in enumerate(pairs) if number not in out],
            [pairs[number] for number in test],
        )
    folder = data_set_folder("multi30k")
    train, test_pairs = (
        read_pairs(folder / f"{part}.en.gz", folder / f"{part}.de.gz") for part in ("train", "test_2016_flickr")
    )
    return Corpus("Multi30k, English to German", train, test_pairs[:held_out])


def generated(pairs: int, held_out: int, words: int, seed: int = 0) -> Corpus:
    """Return pairs of a made language: a translation has other words, and pairs of neighbours change places."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, words + 1)
    made: Pairs = []
    for length in random.integers(3, 9, pairs + held_out).tolist():
        numbers = random.choice(words, length, p=weights / weights.sum()).tolist()
        swapped = [numbers[at ^ 1] if at ^ 1 < length else numbers[at] for at in range(length)]
        made.append((" ".join(f"a{number}" for number in numbers), " ".join(f"b{number}" for number in swapped)))
    return Corpus("generated pairs", made[held_out:], made[:held_out])

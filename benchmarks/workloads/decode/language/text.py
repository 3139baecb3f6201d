"""Running text to learn a language model from, and to begin texts with."""

import lzma
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memhier.benchmarks.datasets import data_set_folder
from memhier.benchmarks.workloads.decode.translator.sentences import generated
from memhier.io.outside import reading

__all__ = ["Text", "brown_and_wikitext", "brown_lines", "given_text", "made_text", "wikitext_lines"]

_HELD_OUT = 200


@dataclass(frozen=True, slots=True)
class Text:
    """Lines of text: to learn from, and held out."""

    name: str
    learned: list[str]
    held_out: list[str]


def brown_and_wikitext() -> Text:
    """Return the Brown corpus and the validation part of WikiText-2; long paragraphs of its test part are held out.

    Raises
    ------
    FileNotFoundError
        When one of the two is missing.
    """
    archive, folder = data_set_folder("brown") / "brown.zip", data_set_folder("wikitext-2")
    lines = brown_lines(archive)
    valid, test = (wikitext_lines(folder / f"{part}.txt.xz") for part in ("valid", "test"))
    order = np.random.default_rng(0).permutation(len(lines) + len(valid))
    both = lines + valid
    return Text("Brown and WikiText-2", [both[at] for at in order], [line for line in test if len(line) > _HELD_OUT])


def given_text(path: Path) -> Text:
    """Return the lines of a file, of which one in twenty is held out."""
    with reading(path, "lines of text in UTF-8"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return Text(path.name, [line for at, line in enumerate(lines) if at % 20], lines[::20])


def made_text(lines: int, words: int) -> Text:
    """Return lines of a made language of so many words, in which words come in pairs."""
    corpus = generated(lines, max(8, lines // 20), words)
    learned, held_out = ([f"{first} {second}" for first, second in each] for each in (corpus.train, corpus.test))
    return Text("made text", learned, held_out)


def brown_lines(archive: Path) -> list[str]:
    """Return the sentences of the Brown corpus."""
    lines: list[str] = []
    with reading(archive, "a zip file"), zipfile.ZipFile(archive) as brown:
        for name in sorted(brown.namelist()):
            if name.startswith("brown/c") and len(name) == len("brown/ca01"):
                lines += [_without_tags(line) for line in brown.read(name).decode().splitlines() if line.strip()]
    return lines


def _without_tags(line: str) -> str:
    return " ".join(token.rpartition("/")[0] for token in line.split())


def wikitext_lines(path: Path) -> list[str]:
    """Return the paragraphs of a part of WikiText-2."""
    with reading(path, "a compressed text"):
        text = lzma.decompress(path.read_bytes()).decode()
    # Headings have marks of equality.
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("=")]

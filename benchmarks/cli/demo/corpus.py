"""The functions of an installation on disk: the listing of each, and its words with their weights.

Six files, written front to back while the sources are read, so that memory holds the vocabulary, a digest for each
function seen and nothing else that grows:

``functions.jsonl``  one object a line: name, signature, path, line, sentence
``lines.i64``        the start of each line, and the end of the file
``counts.i64``       the start of each function's words in the next two, and their end
``words.i32``        numbers of words
``weights.f32``      their weights
``vocabulary.json``  the words in the order of their numbers, and in how many functions each stands
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.benchmarks.cli.demo.extract import Function, extract
from memhier.benchmarks.cli.demo.sources import SourceFile
from memhier.benchmarks.cli.demo.text import weigh_function

__all__ = ["Corpus", "CorpusFacts", "Listing", "ReadFile", "Words", "read_file", "write_corpus"]

Ints: TypeAlias = npt.NDArray[np.int64]


class Listing(NamedTuple):
    """The printed facts of a function. `sentence` is the first of its docstring, which the index never saw."""

    name: str
    signature: str
    path: str
    line: int
    sentence: str


class Words(NamedTuple):
    """Words of some functions: those of the i-th are ``numbers[starts[i]:starts[i + 1]]``, none of them empty."""

    starts: Ints
    numbers: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


class ReadFile(NamedTuple):
    """A function as it comes from a worker: its listing, a digest of its source, its words with their weights."""

    listing: Listing
    digest: bytes
    words: dict[str, float]


@dataclass(frozen=True, slots=True)
class CorpusFacts:
    """Counts of the sources that were read and left out.

    Attributes
    ----------
    functions
        Functions, methods and classes kept.
    files, unreadable
        Files read, and files that are not Python of this version.
    duplicates
        Definitions left out because their name and source stood in an earlier file, as in vendored copies.
    words
        Size of the vocabulary.
    """

    functions: int
    files: int
    unreadable: int
    duplicates: int
    words: int


def read_file(file: SourceFile) -> list[ReadFile] | None:
    """Return the functions of one file, or None when it cannot be read as Python."""
    functions = extract(file)
    if functions is None:
        return None
    return [ReadFile(Listing(f.name, f.signature, f.path, f.line, f.sentence), _digest(f), weigh_function(f))
            for f in functions]  # fmt: skip


def _digest(function: Function) -> bytes:
    own_name = function.name.rpartition(".")[2]
    content = "\0".join([own_name, function.sentence, function.documentation, function.signature, function.code])
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def write_corpus(folder: Path, results: Iterable[list[ReadFile] | None], limit: int | None) -> CorpusFacts:
    """Write the functions to `folder` and return counts of them.

    Parameters
    ----------
    folder
        An existing directory.
    results
        One list for each file, None for a file that could not be read.
    limit
        Stop after this many functions; None for all.
    """
    files = unreadable = duplicates = functions = words = 0
    seen: set[bytes] = set()
    vocabulary: dict[str, int] = {}
    standing_in: list[int] = []
    with (
        open(folder / "functions.jsonl", "wb") as listings,
        open(folder / "lines.i64", "wb") as line_starts,
        open(folder / "counts.i64", "wb") as word_starts,
        open(folder / "words.i32", "wb") as word_numbers,
        open(folder / "weights.f32", "wb") as word_weights,
    ):
        for result in results:
            files += 1
            unreadable += result is None
            for read in result or ():
                if read.digest in seen:
                    duplicates += 1
                    continue
                if functions == limit:
                    break
                seen.add(read.digest)
                numbers = [vocabulary.setdefault(word, len(vocabulary)) for word in read.words]
                standing_in.extend([0] * (len(vocabulary) - len(standing_in)))
                for number in numbers:
                    standing_in[number] += 1
                line_starts.write(np.int64(listings.tell()).tobytes())
                word_starts.write(np.int64(words).tobytes())
                listings.write(json.dumps(read.listing._asdict()).encode() + b"\n")
                word_numbers.write(np.array(numbers, "<i4").tobytes())
                word_weights.write(np.array(list(read.words.values()), "<f4").tobytes())
                words += len(numbers)
                functions += 1
            if functions == limit:
                break
        line_starts.write(np.int64(listings.tell()).tobytes())
        word_starts.write(np.int64(words).tobytes())
    about = {"words": list(vocabulary), "standing_in": standing_in}
    (folder / "vocabulary.json").write_text(json.dumps(about))
    return CorpusFacts(functions, files, unreadable, duplicates, len(vocabulary))


class Corpus:
    """A corpus on disk, read in blocks.

    Attributes
    ----------
    vocabulary
        The words in the order of their numbers.
    standing_in
        int64 ``[len(vocabulary)]``: in how many functions each stands.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = np.memmap(folder / "lines.i64", "<i8", "r")
        self._starts = np.memmap(folder / "counts.i64", "<i8", "r")
        self._numbers = np.memmap(folder / "words.i32", "<i4", "r")
        self._weights = np.memmap(folder / "weights.f32", "<f4", "r")
        self._listings = folder / "functions.jsonl"
        about = json.loads((folder / "vocabulary.json").read_text())
        self.vocabulary: list[str] = about["words"]
        self.standing_in: Ints = np.array(about["standing_in"], np.int64)

    def __len__(self) -> int:
        return len(self._lines) - 1

    def words(self, rows: npt.ArrayLike) -> Words:
        """Return the words of the functions at `rows`."""
        chosen = np.asarray(rows, np.int64)
        spans = [slice(*self._starts[row : row + 2]) for row in chosen]
        starts = np.concatenate([[0], np.cumsum([span.stop - span.start for span in spans])]).astype(np.int64)
        if not spans:
            return Words(starts, np.empty(0, np.int32), np.empty(0, np.float32))
        return Words(
            starts,
            np.concatenate([self._numbers[span] for span in spans]),
            np.concatenate([self._weights[span] for span in spans]),
        )

    def listing(self, row: int) -> Listing:
        """Return the listing of the function at `row`."""
        with open(self._listings, "rb") as file:
            file.seek(int(self._lines[row]))
            return Listing(**json.loads(file.readline()))

    def listings(self) -> Iterator[Listing]:
        """Yield the listing of each function, in order."""
        with open(self._listings, "rb") as file:
            for line in file:
                yield Listing(**json.loads(line))

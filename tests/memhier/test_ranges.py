"""Ranges of many lengths and files, beside plain slices of their bytes."""

import numpy as np
import pytest

from memhier.io import ranges
from memhier.io.ranges import CountedReads, Ranges, read_together
from memhier.io.reader import Reader


def reading(*steps):
    """Ask for the ranges of each step; return the bytes of all."""
    found = []
    for step in steps:
        found += [raw.tobytes() for raw in (yield list(step))]
    return found


@pytest.mark.parametrize("few", [1 << 16, 1], ids=["together", "split"])
@pytest.mark.parametrize("most", [1, 16, 4096, 30_000])
def test_ranges_are_slices_of_their_files(tmp_path, monkeypatch, few, most):
    monkeypatch.setattr(ranges, "_FEW_BYTES", few)
    draw = np.random.default_rng(most)
    contents = [draw.bytes(4096 * pages) for pages in (1, 20)]
    with Reader() as reader:
        files = []
        for number, raw in enumerate(contents):
            (tmp_path / str(number)).write_bytes(raw)
            files.append(reader.add(tmp_path / str(number)))
        asked, expected = {}, {}
        for key in range(5):
            steps = []
            for _ in range(key):
                some = []
                for file, raw in zip(files, contents, strict=True):
                    lengths = draw.integers(0, min(most, len(raw)) + 1, draw.integers(0, 9))
                    offsets = draw.integers(0, len(raw) - lengths + 1)
                    some.append(Ranges(file, offsets, lengths))
                    pieces = [raw[at : at + size] for at, size in zip(offsets, lengths, strict=True)]
                    expected.setdefault(key, []).append(b"".join(pieces))
                steps.append(some)
            asked[key] = reading(*steps)
        reads = CountedReads(reader)
        found = read_together(reads, asked)
        assert found == {key: expected.get(key, []) for key in range(5)}
        if few > 1 and most <= 16:
            assert reads.rounds <= 4  # as many as the longest reading has steps
        assert reads.tally["bytes"][0] == 4096 * reads.tally["pages"][0]
    assert read_together(reads, {}) == {}

"""Runbooks of a stream: read as published, and generated."""

from pathlib import Path

import numpy as np
import pytest

from memhier.benchmarks.workloads.streams.runbooks import (
    GENERATED,
    Step,
    alive,
    clustered,
    expiring,
    read_runbook,
    sliding,
)
from memhier.errors import FormatError

PUBLISHED = """msturing-10M:
  max_pts: 20
  gt_url: "https://example.invalid/truth"
  1:
    end: 20
    operation: insert
    start: 0
  2:
    operation: "search"
  3:
    operation: delete
    start: 0
    end: 5
  4:
    ids_end: 12
    ids_start: 10
    operation: replace
    tags_end: 8
    tags_start: 6
"""


def test_a_published_runbook_is_read(tmp_path: Path) -> None:
    path = tmp_path / "runbook.yaml"
    path.write_text(PUBLISHED)
    book = read_runbook(path, "msturing-10M")
    assert book == read_runbook(path)
    assert book == [
        Step("insert", 0, 20), Step("search"), Step("delete", 0, 5),
        Step("replace", tags_start=6, tags_end=8, ids_start=10, ids_end=12),
    ]  # fmt: skip
    last = [*alive(book)][-1]
    assert last == {5: 5, 6: 10, 7: 11} | {each: each for each in range(8, 20)}


@pytest.mark.parametrize(
    "text",
    ["", "a:\n  1:\n    operation: jump\n", "a:\n  1:\n    operation: insert\n    start: 3\n", "words\n",
     "a:\n  1:\n    operation: delete\n    start: 3\n    end: 1\n", "a:\n  1:\n    operation: insert\n    start: x\n",
     "a:\n  1:\n    operation: search\nb:\n  1:\n    operation: search\n"],
)  # fmt: skip
def test_no_runbook_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runbook.yaml"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"runbook\.yaml"):
        read_runbook(path)


@pytest.mark.parametrize("book", [sliding(1000, 20), expiring(1000, 40), clustered([50, 0, 300, 7])])
def test_generated_runbooks_insert_once_and_delete_only_what_is_there(book: list[Step]) -> None:
    there: set[int] = set()
    inserted = 0
    for step in book:
        rows = set(range(step.start, step.end))
        if step.operation == "insert":
            assert not rows & there
            inserted += len(rows)
            there |= rows
        elif step.operation == "delete":
            assert rows <= there
            there -= rows
    assert inserted in (1000, 357)
    assert any(step.operation == "search" for step in book)


@pytest.mark.parametrize("name", GENERATED)
def test_the_order_of_a_runbook_has_every_vector_once(name: str) -> None:
    vectors = np.random.default_rng(0).normal(size=(700, 8)).astype(np.float32)
    order, book = GENERATED[name](vectors, 40, 0)
    assert np.array_equal(np.sort(order), np.arange(700))
    assert max(step.end for step in book) == 700

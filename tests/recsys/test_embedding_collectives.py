"""Exchanged values go to the device of the group's backend, and come back. nccl itself was not run."""

import itertools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from memhier.recsys.embedding.sharding.collectives import Collectives, device_of
from memhier.recsys.embedding.sharding.exchange import Packing, ask, say_what_can_wait


def test_each_backend_has_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of("gloo") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of("nccl") == torch.device("cuda", 3)


@pytest.mark.usefixtures("one_rank")
def test_all_that_is_exchanged_lies_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors on "meta" have no values: only whether everything was brought there can be seen.
    seen: list[torch.device] = []

    def noted(*tensors: Any, **_: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, list):
                noted(*tensor)
            elif isinstance(tensor, torch.Tensor):
                seen.append(tensor.device)

    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [0] * tensor.numel())
    for name in ("all_to_all_single", "all_gather", "all_reduce"):
        monkeypatch.setattr(dist, name, noted)
    ranks = Collectives(None, torch.device("meta"))
    for other in (ranks, ranks.like()):
        assert other.exchange(torch.arange(3), [3], [3]).device == torch.device("cpu")
        other.of_each(torch.ones(1, 2, dtype=torch.int64))
        other.all([1, 2])
        other.total(torch.ones(2))
    assert len(seen) == 2 * (2 + 2 + 2 + 1)
    assert set(seen) == {torch.device("meta")}


@pytest.mark.usefixtures("one_rank")
def test_one_rank_gets_what_it_gives() -> None:
    ranks = Collectives(None)
    assert ranks.exchange(torch.arange(5), [5], [5]).tolist() == [0, 1, 2, 3, 4]
    assert ranks.start(torch.arange(2.0), [2], [2]).wait().tolist() == [0, 1]
    assert (ranks.all([7, 8]), ranks.total(torch.ones(2)).tolist(), ranks.sent_bytes) == ([[7, 8]], [1, 1], 0)


@pytest.mark.usefixtures("one_rank")
def test_a_step_does_not_keep_those_after_it() -> None:
    ranks, bases = Collectives(None), np.array([0, 50])
    steps = [ask([np.arange(start, start + 5)], bases, ranks) for start in (0, 3, 20)]
    for step, following in itertools.pairwise(steps):
        say_what_can_wait(step, following, ranks)
    first, last = steps[0], weakref.ref(steps[-1])
    assert first.later is not None
    assert first.later.tolist() == [True] * 3 + [False] * 2
    del steps, step, following
    assert last() is None


@given(widths=st.lists(st.sampled_from([1, 3, 4]), max_size=20), spare=st.integers(0, 2))
def test_rows_of_any_widths_go_through_a_vector(widths: list[int], spare: int) -> None:
    layout, widest = Packing(np.array(widths, np.int64)), max(widths, default=1) + spare
    rows = torch.arange(float(len(widths) * widest)).view(-1, widest)
    vector = layout.joined(rows)
    assert vector.tolist() == [
        number for row, width in zip(rows.tolist(), widths, strict=True) for number in row[:width]
    ]
    again = layout.parted(vector, widest)
    assert all(torch.equal(again[at, :width], rows[at, :width]) for at, width in enumerate(widths))
    half = len(widths) // 2
    assert layout.floats([half, len(widths) - half]) == [sum(widths[:half]), sum(widths[half:])]

"""A store goes back from its last commit to the one before, or to an earlier one that commits kept."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.io.reader import Reader
from memhier.log.row_log import RowLog
from memhier.store.store import Store
from memhier.store.way_back import before_last, go_back

KEYS = 12
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # its copies and syncs are many

change = st.one_of(
    st.tuples(st.just("append"), st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=8)),
    st.tuples(st.just("delete"), st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=3)),
    st.tuples(st.just("compact"), st.just([])),
    st.tuples(st.sampled_from(["commit", "commit further"]), st.just([])),
)


def contents(path: Path) -> tuple[dict[int, int], bytes | None, bytes | None]:
    with Store.open(path, "x", writable=True) as store, Reader() as reader:
        assert store.check() == []
        if store.get("log/t") is None:
            return {}, store.get("often"), store.get("once")
        with RowLog(store, "t", row_bytes=4, reader=reader, capacity=KEYS) as log:
            rows, found = log.read(np.arange(KEYS))
            held = {key: int(rows[key].view("<i4")[0]) for key in np.flatnonzero(found).tolist()}
            return held, store.get("often"), store.get("once")


@settings(max_examples=40, deadline=None)
@given(changes=st.lists(change, max_size=40))
def test_an_earlier_commit_is_there(changes: list[Any]) -> None:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        check_the_way_back(Path(folder) / "store", changes)


def check_the_way_back(path: Path, changes: list[Any]) -> None:
    with Store.create(path, kind="x") as store, store.begin() as tx:
        tx.commit()
    moments = [contents(path)]
    truth: dict[int, int] = {}
    goal = 0
    with Store.open(path, "x", writable=True) as store, Reader() as reader:
        with RowLog(store, "t", row_bytes=4, reader=reader, capacity=KEYS) as log:
            log.way_back = True
            for number, (kind, keys) in enumerate([*changes, ("commit", [])]):
                if kind == "append":
                    log.append(keys, np.full((len(keys), 1), number, "<i4").view(np.uint8))
                    truth |= dict.fromkeys(keys, number)
                elif kind == "delete":
                    log.delete(keys)
                    truth = {key: value for key, value in truth.items() if key not in keys}
                elif kind == "compact":
                    log.compact(1)
                else:
                    once = {"once": b"x"} if number % 3 == 0 and store.get("once") is None else {}
                    log.way_back_further = kind == "commit further"
                    log.commit({"often": str(number).encode()} | once)
                    # The first has no way to go on from.
                    goal = goal if log.way_back_further else len(moments) - 1
                    moments.append((dict(truth), store.get("often"), store.get("once")))
        assert before_last(store, "often") == moments[goal][1]
    assert contents(path) == moments[-1]
    with Store.open(path, "x", writable=True) as store:
        go_back(store)
        assert before_last(store, "often") == moments[goal][1] == store.get("often")
        with pytest.raises(ValueError, match="no way back"):
            go_back(store)
    assert contents(path) == moments[goal]
    # On from there, under the same numbers.
    with (
        Store.open(path, "x", writable=True) as store,
        Reader() as reader,
        RowLog(store, "t", row_bytes=4, reader=reader, capacity=KEYS) as log,
    ):
        log.append([0], np.full((1, 1), 99, "<i4").view(np.uint8))
        log.commit()
    assert contents(path)[0] == moments[goal][0] | {0: 99}

"""Segments that are written beside transactions, and taken over by one."""

import os
import shutil

import numpy as np
import pytest

from memhier.errors import ClosedError
from memhier.store.store import Store


def staged(store, **contents):
    staging = store.stage()
    for name, values in contents.items():
        staging.segment(name).append(np.array(values, np.uint8))
    staging.finish()
    return staging


def held(store):
    return {name: store.read_segment(name).tolist() for name in store.segments()}


def test_a_transaction_takes_over_segments_staged_while_others_were_open(tmp_path):
    with Store.create(tmp_path / "store", kind="example") as store:
        staging = store.stage()
        writer = staging.segment("a")
        writer.append(b"\x01" * 5000)
        with store.begin() as tx:
            tx.segment("b").append(b"\x02")
            tx.segment("a").append(b"\x00")
            tx.commit()
        writer.append(b"\x03")
        staging.finish()
        assert held(store) == {"a": [0], "b": [2]}
        with store.begin() as tx:
            tx.adopt(staging)
            with pytest.raises(ValueError, match="already"):
                tx.segment("a")
            assert tx.written == ["a"]
            tx.commit()
        expected = {"a": [1] * 5000 + [3], "b": [2]}
        assert held(store) == expected
        assert store.check() == []
    with Store.open(tmp_path / "store", kind="example", verify="open") as store:
        assert held(store) == expected


def test_an_abort_or_a_drop_leaves_no_file(tmp_path):
    with Store.create(tmp_path / "store", kind="example") as store:
        with store.begin() as tx:
            tx.segment("a").append(b"\x01")
            tx.commit()
        with store.begin() as tx:
            tx.adopt(staged(store, a=[2], b=[3]))
        staged(store, c=[1]).drop()
        unfinished = store.stage()
        unfinished.segment("d").append(b"\x01")
        unfinished.drop()
        unfinished.drop()
        with pytest.raises(ClosedError):
            unfinished.segment("e")
        with store.begin() as tx:
            tx.segment("c").append(b"\x04")
            other = staged(store, c=[5])
            with pytest.raises(ValueError, match="already"):
                tx.adopt(other)
        other.drop()
        assert held(store) == {"a": [1]}
        assert os.listdir(tmp_path / "store" / "tmp") == []
        assert len(os.listdir(tmp_path / "store" / "segments")) == 1


def test_the_next_writer_removes_segments_not_taken_over(tmp_path):
    with Store.create(tmp_path / "store", kind="example") as store:
        with store.begin() as tx:
            tx.segment("a").append(b"\x01")
            tx.commit()
        staged(store, a=[2] * 9000, b=[3])
        shutil.copytree(tmp_path / "store", tmp_path / "killed")
        assert all(finding.harmless for finding in store.check())
    with Store.open(tmp_path / "killed", kind="example", verify="open") as store:
        assert held(store) == {"a": [1]}
        with pytest.raises(OSError, match="reading"):
            store.stage()
    with Store.open(tmp_path / "killed", kind="example", writable=True) as store:
        assert held(store) == {"a": [1]}
        assert store.check() == []

"""Items come, change and go: searches agree with a model at every step, over commits, openings, kills and faults."""

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from memhier.ann import MultiVectorIndex
from memhier.ann.multivector.storage.catalog import KEY, KIND
from memhier.files import Fault, FaultyFiles, RealFiles
from memhier.store.store import Store

SCRIPT = Path(__file__).with_name("multivector_until_killed.py")


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


child, data = module_of(SCRIPT), module_of(SCRIPT.with_name("multivector_data.py"))


def holds(index, model):
    """Whether the index holds just these items."""
    if len(index) != len(model):
        return False
    try:
        found = index.reconstruct(list(model))
        texts = index.fetch(list(model)) if "text" in index.fields else child.texts_of(model)
    except KeyError:
        return False
    return list(texts["text"]) == child.texts_of(model)["text"] and all(
        np.array_equal(one, other) for one, other in zip(found, child.items_of(model), strict=True)
    )


def assert_holds(index, model):
    assert holds(index, model)
    items = dict(zip(model, child.items_of(model), strict=True))
    stats = index.stats()
    assert stats["items"] == len(model)
    assert stats["vectors"] == sum(len(item) for item in items.values())
    assert stats["memory_bytes"] <= stats["planned_bytes"] <= stats["dram"]
    if items:
        query = child.item_of(max(model), model[max(model)])[:4]
        data.assert_best(index.search(query, 8, recall=1.0), query, items, 8)
        third = {name: item for name, item in items.items() if name % 3 == 1}
        data.assert_best(index.search(query, 8, recall=1.0, where="third == 1"), query, third, 8)


def begun(path, count=60):
    """Return a new index of the items 1 to `count`, and its model."""
    model = dict.fromkeys(range(1, count + 1), 0)
    columns = {"third": [name % 3 for name in model]}
    index = MultiVectorIndex.build(
        path, child.items_of(model), list(model), attributes=columns, documents=child.texts_of(model), dram="6MiB",
        grow_to=400,
    )  # fmt: skip
    return index, model


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_random_changes_agree_with_a_model(tmp_path, small_sizes, renewed, seed):
    rng = random.Random(seed)
    index, model = begun(tmp_path / "index")
    committed = dict(model)
    for _ in range(25):
        child.change(index, model, rng)
        assert_holds(index, model)
        step = rng.random()
        if step < 0.4:
            index.commit(compact=rng.choice([None, None, False, True]))
            committed = dict(model)
        elif step < 0.5:
            index.close()
            index, model = MultiVectorIndex.open(tmp_path / "index", writable=True), dict(committed)
        assert_holds(index, model)
    index.commit()
    renewed(index)
    assert index.check() == []
    index.close()
    with MultiVectorIndex.open(tmp_path / "index", verify="open") as reader:
        assert_holds(reader, model)
        assert reader.stats()["parts"] <= 8


@pytest.mark.parametrize("empty", [np.empty((0, 6), np.float32), np.empty((0, 3, 6), np.float32)])
def test_an_index_begins_empty_and_becomes_empty(tmp_path, empty, renewed):
    lengths = [] if empty.ndim == 2 else None
    with MultiVectorIndex.build(tmp_path / "index", empty, lengths=lengths, dram="6MiB", grow_to=400) as index:
        assert len(index) == 0
        assert index.search(np.ones((2, 6)), 3).ids.tolist() == [-1, -1, -1]
        index.commit()
        model = dict.fromkeys(range(300), 0)
        index.add(child.items_of(model), attributes={"third": [name % 3 for name in model]})
        assert_holds(index, model)
        index.commit()
        renewed(index)
        assert index.stats()["calibrated"]
        assert_holds(index, model)
        index.remove(list(model))
        assert index.search(np.ones((2, 6)), 3).ids.tolist() == [-1, -1, -1]
        index.commit()
        assert len(index) == 0
    with MultiVectorIndex.open(tmp_path / "index", writable=True) as index:
        assert len(index) == 0
        assert index.add([child.item_of(7, 0)]).tolist() == [300]
        index.commit()
        assert holds(index, {300: 0}) is False
        assert np.array_equal(index.reconstruct([300, 300])[1], child.item_of(7, 0))


def test_attributes_are_updated_alone_and_removed_by_filter(tmp_path):
    index, model = begun(tmp_path / "index")
    with index:
        index.update([3, 4], attributes=[{"name": "x"}, {"name": "y", "third": 7}])
        index.commit()
        index.update([5], attributes={"name": ["y"]})
        query = child.item_of(3, 0)
        assert sorted(index.search(query, 3, where="name == 'y'").ids.tolist()) == [-1, 4, 5]
        assert index.search(query, 3, where="name == 'x' and third == 0").ids.tolist() == [3, -1, -1]
        assert index.search(query, 3, where="third == 7").ids.tolist() == [4, -1, -1]
        assert holds(index, model)
        assert index.remove(where="name == 'y'") == 2
        assert index.remove(where="third == 9") == 0
        assert holds(index, {name: 0 for name in model if name not in (4, 5)})


def test_a_second_process_reads_commits(tmp_path):
    index, model = begun(tmp_path / "index")
    with index, MultiVectorIndex.open(tmp_path / "index") as reader:
        before = dict(model)
        child.change(index, model, random.Random(1))
        assert_holds(reader, before)
        assert not reader.refresh()
        for compact in (False, True):
            index.commit(compact=compact)
            assert_holds(reader, before)
            assert reader.refresh()
            before = dict(model)
            assert_holds(reader, model)
            child.change(index, model, random.Random(2))
        code = (
            "import sys; from memhier.ann import MultiVectorIndex\n"
            "with MultiVectorIndex.open(sys.argv[1]) as index: print(len(index), index.check())\n"
            "try: MultiVectorIndex.open(sys.argv[1], writable=True)\n"
            "except Exception as error: print(type(error).__name__)"
        )
        command = [sys.executable, "-c", code, tmp_path / "index"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.stdout.split() == [str(len(before)), "[]", "LockedError"], run.stderr


@pytest.mark.long
def test_searches_run_beside_changes(tmp_path, small_sizes):
    index, _ = begun(tmp_path / "index")
    query, ended, found, failed = child.item_of(1, 0), threading.Event(), [], []
    nothing = [np.zeros((4, 6), np.float32)] * 30

    def search():
        try:
            while not ended.is_set():
                found.append(index.search(query, 5, recall=1.0).ids.tolist())
        except BaseException as error:
            failed.append(error)

    with index:
        best = index.search(query, 5, recall=1.0).ids.tolist()
        threads = [threading.Thread(target=search) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for compact in (None, False, True, None, True):
                ids = index.add(nothing)
                index.commit(compact=compact)
                index.remove(ids)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    assert not failed
    assert set(map(tuple, found)) == {tuple(best)}


@pytest.mark.long
def test_killed_while_it_changes(tmp_path):
    index, model = begun(tmp_path / "index")
    index.close()
    for name in ("last.json", "next.json"):
        child.write_model(tmp_path / name, model)
    rng = random.Random(1)
    for number in range(4):
        with subprocess.Popen(
            [sys.executable, SCRIPT, tmp_path, str(number)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "done\n"
            time.sleep(rng.random() * 0.2)
            process.send_signal(signal.SIGKILL)
        with MultiVectorIndex.open(tmp_path / "index", verify="open") as reader:
            assert reader.check() == []
        with MultiVectorIndex.open(tmp_path / "index", writable=True) as index:
            models = [child.read_model(tmp_path / name) for name in ("last.json", "next.json")]
            model = next(each for each in models if holds(index, each))
            assert_holds(index, model)
            with Store.open(tmp_path / "index", kind=KIND) as store:
                files = {each.path.name for each in store.segments().values()}
            assert set(os.listdir(tmp_path / "index" / "segments")) == files
        child.write_model(tmp_path / "last.json", model)


NEW = [child.item_of(name, 3) for name in range(200, 260)]
CHANGES = {
    "add": lambda index, _: index.add(NEW, attributes={"n": range(60)}, documents={"text": ["new"] * 60}),
    "update": lambda index, model: index.update(sorted(model)[:40], NEW[:40], documents={"text": ["other"] * 40}),
    "commit": lambda index, _: index.commit(),
    "compact": lambda index, _: index.compact(),
}


def open_changed(built, path, switch):
    """Open a copy of an index, change it, and return it with its items."""
    shutil.copytree(built, path)
    index = MultiVectorIndex(Store.open(path, kind=KIND, writable=True, files=switch))
    model = dict.fromkeys(range(1, 61), 0)
    child.change(index, model, random.Random(4))
    return index, model, switch


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("fault", [Fault.SHORT_WRITE, Fault.EIO])
def test_a_fault_leaves_the_index_as_it_was(tmp_path, small_sizes, switched_files, name, fault):
    begun(tmp_path / "built")[0].close()

    index, model, switch = open_changed(tmp_path / "built", tmp_path / "counted", switched_files())
    with index:
        switch.files = faulty = FaultyFiles(RealFiles(), 0, fault)
        CHANGES[name](index, model)
        last = len(faulty.calls)
    for fail_at in {*range(1, last, max(1, last // 5)), last - 1}:
        index, model, switch = open_changed(tmp_path / "built", tmp_path / f"failed{fail_at}", switched_files())
        with index:
            switch.files = FaultyFiles(RealFiles(), fail_at, fault)
            try:
                CHANGES[name](index, model)
            except OSError:
                switch.files = RealFiles()
                assert holds(index, model)
            switch.files = RealFiles()
        committed = dict.fromkeys(range(1, 61), 0)
        with MultiVectorIndex.open(tmp_path / f"failed{fail_at}", writable=True) as index:
            assert index.check() == []
            assert holds(index, committed) or holds(index, model)
            model = dict.fromkeys(range(1, 61), 0) if holds(index, committed) else model
            child.change(index, model, random.Random(5))
            index.commit()
            assert_holds(index, model)


@pytest.mark.parametrize("name", ["commit", pytest.param("compact", marks=pytest.mark.long)])
def test_a_full_disk_changes_nothing_and_the_call_can_be_repeated(tmp_path, small_sizes, switched_files, name):
    begun(tmp_path / "built")[0].close()

    index, model, switch = open_changed(tmp_path / "built", tmp_path / "counted", switched_files())
    with index:
        switch.files = faulty = FaultyFiles(RealFiles())
        CHANGES[name](index, model)
        # All that takes room, but for the guard of LMDB's commit.
        takes = [
            number
            for number, call in enumerate(faulty.calls, 1)
            if call.startswith(("pwrite", "append", "fdatasync", "open-x", "open-w")) and "catalog" not in call
        ]
    for fail_at in takes[:: len(takes) // 5]:
        path = tmp_path / f"failed{fail_at}"
        index, model, switch = open_changed(tmp_path / "built", path, switched_files())
        with index:
            switch.files = FaultyFiles(RealFiles(), fail_at, Fault.SHORT_WRITE)
            with pytest.raises(OSError, match="No space"):
                CHANGES[name](index, model)
            assert_holds(index, model)
            CHANGES[name](index, model)
        with MultiVectorIndex.open(path, verify="open") as index:
            assert index.check() == []
            assert_holds(index, model)


def test_an_index_of_the_first_format_opens(tmp_path):
    index, model = begun(tmp_path / "index")
    index.close()
    with Store.open(tmp_path / "index", kind=KIND, writable=True) as store, store.begin() as tx:
        about = json.loads(store.get(KEY))
        learnt = about["calibration"].pop("learnt")[-1]
        about["calibration"] |= {"biases": learnt["biases"], "efforts": learnt["efforts"]}
        tx.put(KEY, json.dumps(about | {"version": 1}).encode())
        tx.commit()
    with MultiVectorIndex.open(tmp_path / "index", writable=True) as index:
        assert not index.stats()["calibrated"]
        assert index.search(child.item_of(1, 0), 3).stats["recall"] == 1.0
        assert_holds(index, model)
        index.compact()
        assert index.stats()["calibrated"]
    with MultiVectorIndex.open(tmp_path / "index") as index:
        assert index.stats()["calibrated"]
        assert_holds(index, model)

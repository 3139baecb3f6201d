"""kill -9 while an index changes: what was committed is there and found, and nothing else."""

import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.storage.catalog import KIND, Description
from memhier.store.store import Store

FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
SCRIPT = Path(__file__).with_name("life_until_killed.py")
spec = importlib.util.spec_from_file_location("life_until_killed", SCRIPT)
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)


def holds(index, model):
    """Whether the index holds just these vectors."""
    if len(index) != len(model):
        return False
    try:
        found = index.reconstruct(child.ids_of(index, model))
        turns = index.fetch(child.ids_of(index, model), ["turn"])["turn"].tolist()
    except KeyError:
        return False
    return np.array_equal(found, child.vectors_of(model)) and turns == child.columns_of(model)["turn"]


def model_of(folder, index):
    """Return what the index holds, which is what was committed last or what was being committed."""
    models = [child.read_model(folder / name) for name in ("last.json", "next.json")]
    models = [model for model in models if holds(index, model)]
    assert models
    return models[0]


def check(folder):
    """Look at the index after a kill, keep what it holds as the last model, and return the bytes on disk."""
    with ZoomIndex.open(folder / "index", verify="open") as index:
        assert index.check() == []
        model_of(folder, index)
    # A writer may find that the commit was made after all, and only not told yet.
    with ZoomIndex.open(folder / "index", writable=True) as index:
        model = model_of(folder, index)
        assert index.check() == []
        with Store.open(folder / "index", kind=KIND) as store:
            about, segments = Description.decode(store.get("index"), store.path), store.segments()
        assert set(os.listdir(folder / "index" / "segments")) == {each.path.name for each in segments.values()}
        parts = {entry["name"] for entry in about.parts}
        assert {name.partition("-")[0] for name in segments if "-" in name} == parts
        alive = {entry["alive"] for entry in about.parts} - {None}
        assert {name for name in segments if "-alive" in name} == alive
        assert about.pending == []
        assert index.stats()["parts"] <= 8
        vectors = child.vectors_of(model)
        result = index.search(vectors, 1, recall=1.0)
        np.testing.assert_array_equal(result.ids[:, 0], child.ids_of(index, model))
        third = index.search(vectors[0], len(model), recall=1.0, where="third == 1").ids
        expected = child.ids_of(index, (name for name in model if name % 3 == 1))
        assert sorted(third[: len(expected)]) == sorted(expected)
        turned = child.ids_of(index, (name for name, version in model.items() if version >= child.TURN))
        assert {name for block in index.ids("turn > 0") for name in block.tolist()} == set(turned)
        assert set(third[len(expected) :]) <= {-1, None}
    child.write_model(folder / "last.json", model)
    return sum(path.stat().st_size for path in (folder / "index").rglob("*") if path.is_file())


def kill_rounds(folder, rounds, seed, strings=False):
    rng = random.Random(seed)
    model = dict.fromkeys(range(1, 100), 0)
    columns = child.columns_of(model)
    ids = [child.text_of(name) for name in model] if strings else list(model)
    ZoomIndex.build(folder / "index", child.vectors_of(model), ids=ids, attributes=columns, dram="4MiB").close()
    for name in ("last.json", "next.json"):
        child.write_model(folder / name, model)
    sizes = []
    with subprocess.Popen([sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        for number in range(rounds):
            print(folder, seed * 1000 + number, file=parent.stdin, flush=True)
            word, pid = parent.stdout.readline().split()
            assert word == "child"
            assert parent.stdout.readline() == "done\n", "the child failed"
            time.sleep(rng.random() * 0.1)
            os.kill(int(pid), signal.SIGKILL)
            while (line := parent.stdout.readline()) == "done\n":
                pass
            assert line == f"gone {-signal.SIGKILL}\n"
            sizes.append(check(folder))
        parent.stdin.close()
    assert max(sizes) < (3 << 20 if strings else 1 << 20), sizes


@pytest.mark.long
@pytest.mark.parametrize("strings", [False, True])
def test_killed_while_it_changes(strings):
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        kill_rounds(Path(folder), 8, 1, strings)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strings", [False, True])
def test_killed_a_hundred_times_while_it_changes(tmp_path, strings):
    kill_rounds(tmp_path, 100, 2, strings)
    shutil.rmtree(tmp_path)

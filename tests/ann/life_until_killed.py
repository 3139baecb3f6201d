"""A process whose children change an index until they are killed; run by test_zoom_life_kill.py.

For every line ``folder seed`` on its input it forks a child, which says ``child <pid>``, and ``done`` after each of its
commits. Forked from a process that has run nothing in threads, a child is at work at once.

A vector follows from its id and the version modulo `TURN`; the attribute ``turn`` is the version divided by it. An
index of strings has a string for every id. What an index should hold, ``{id: version}``, is written to ``next.json``
before a commit, and becomes ``last.json`` when the commit has returned.
"""

import json
import os
import random
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from memhier.ann import ZoomIndex
from memhier.ann.zoom.renewal import merge
from memhier.ann.zoom.storage import layout

DIMENSION = 12
ROWS = 250  # that an index comes to
TURN = 1000  # of a version: an update of the attribute alone
Model = dict[int, int]


def vector_of(name: int, version: int) -> np.ndarray:
    """Return the one vector of an id and version, apart from all others."""
    rng = np.random.default_rng([name, version % TURN])
    return (rng.normal(size=DIMENSION) + 5 * (name % 3)).astype(np.float32)


def vectors_of(model: Model) -> np.ndarray:
    """Return the vectors of a model, ``[n, d]``."""
    return np.array([vector_of(name, version) for name, version in model.items()], np.float32).reshape(-1, DIMENSION)


def columns_of(model: Model) -> dict[str, list[int]]:
    """Return the attributes of a model."""
    return {"third": [name % 3 for name in model], "turn": [version // TURN for version in model.values()]}


def ids_of(index: ZoomIndex, names: Iterable[int]) -> list[int] | list[str]:
    """Return ids as an index has them."""
    if index.stats()["id_kind"] == "int64":
        return list(names)
    return [text_of(name) for name in names]


def text_of(name: int) -> str:
    """Return the string that stands for a number."""
    return f"{name}-" + "é" * (name * 37 % 400)


def read_model(path: Path) -> Model:
    """Return what :func:`write_model` wrote."""
    return {int(name): version for name, version in json.loads(path.read_text()).items()}


def write_model(path: Path, model: Model) -> None:
    """Write a model so that a reader sees all of it or the one before."""
    path.with_suffix(".tmp").write_text(json.dumps(model))
    os.replace(path.with_suffix(".tmp"), path)


def change(index: ZoomIndex, model: Model, rng: random.Random) -> None:
    """Add, update and remove, in the index and in the model."""
    first = max(model, default=0) + 1
    more = dict.fromkeys(range(first, first + rng.choice([1, 3, 40])), 0)
    index.add(vectors_of(more), ids=ids_of(index, more), attributes=columns_of(more))
    model |= more
    other = {name: model[name] + 1 for name in rng.sample(sorted(model), min(len(model), rng.choice([1, 3, 30])))}
    index.update(ids_of(index, other), vectors_of(other), columns_of(other))
    model |= other
    turned = {name: model[name] + TURN for name in rng.sample(sorted(model), min(len(model), rng.choice([1, 3, 30])))}
    index.update(ids_of(index, turned), attributes={"turn": columns_of(turned)["turn"]})
    model |= turned
    gone = rng.sample(sorted(model), max(rng.choice([0, 1, 20]), len(model) - ROWS))
    index.remove(ids_of(index, gone))
    for name in gone:
        del model[name]


def work(folder: Path, seed: int) -> None:
    """Change the index in `folder` until killed."""
    layout._FRESH_MOST, merge._CHUNK_BYTES, layout._VECTORS_PER_LIST = 1000, 2000, 25
    rng = random.Random(seed)
    model = read_model(folder / "last.json")
    with ZoomIndex.open(folder / "index", writable=True) as index:
        while True:
            for _ in range(rng.choice([1, 3])):
                change(index, model, rng)
            write_model(folder / "next.json", model)
            if rng.random() < 0.2:
                index.compact()
            else:
                index.commit()
            write_model(folder / "last.json", model)
            print("done", flush=True)


def main() -> None:
    """Fork a child for every line."""
    for line in sys.stdin:
        folder, seed = line.rsplit(" ", 1)
        child = os.fork()
        if child == 0:
            try:
                print("child", os.getpid(), flush=True)
                work(Path(folder), int(seed))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        print("gone", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()

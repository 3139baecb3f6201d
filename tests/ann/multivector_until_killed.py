"""A process that changes an index of items until it is killed; run by test_multivector_life.py with ``folder seed``.

It says ``done`` after each commit. The tokens of an item follow from its id and version. What the index should hold,
``{id: version}``, is written to ``next.json`` before a commit, and becomes ``last.json`` when the commit has returned.
"""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np

from memhier.ann import MultiVectorIndex
from memhier.ann.zoom.storage import layout

DIMENSION = 6
ITEMS = 120  # that an index comes to


def item_of(name, version):
    """Return the tokens of an id and version."""
    rng = np.random.default_rng([name, version])
    return (rng.normal(size=(int(rng.integers(1, 12)), DIMENSION)) + 3 * (name % 3)).astype(np.float32)


def items_of(model):
    """Return the items of a model."""
    return [item_of(name, version) for name, version in model.items()]


def texts_of(model):
    """Return the documents of a model."""
    return {"text": [f"item {name} of version {version}" for name, version in model.items()]}


def read_model(path):
    """Return what :func:`write_model` wrote."""
    return {int(name): version for name, version in json.loads(path.read_text()).items()}


def write_model(path, model):
    """Write a model so that a reader sees all of it or the one before."""
    path.with_suffix(".tmp").write_text(json.dumps(model))
    os.replace(path.with_suffix(".tmp"), path)


def change(index, model, rng):
    """Add, update and remove, in the index and in the model."""
    first = max(model, default=0) + 1
    more = dict.fromkeys(range(first, first + rng.choice([1, 3, 20])), 0)
    index.add(items_of(more), list(more), {"third": [name % 3 for name in more]}, texts_of(more))
    model |= more
    other = {name: model[name] + 1 for name in rng.sample(sorted(model), min(len(model), rng.choice([1, 3, 15])))}
    index.update(list(other), items_of(other), documents=texts_of(other))
    model |= other
    gone = rng.sample(sorted(model), max(rng.choice([0, 1, 10]), len(model) - ITEMS))
    index.remove(gone)
    for name in gone:
        del model[name]


def main():
    """Change the index until killed."""
    layout._FRESH_MOST = 2000
    folder, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    model = read_model(folder / "last.json")
    with MultiVectorIndex.open(folder / "index", writable=True) as index:
        while True:
            for _ in range(rng.choice([1, 3])):
                change(index, model, rng)
            write_model(folder / "next.json", model)
            index.commit(compact=True if rng.random() < 0.2 else None)
            write_model(folder / "last.json", model)
            print("done", flush=True)


if __name__ == "__main__":
    main()

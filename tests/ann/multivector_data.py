"""Items of many vectors, and exhaustive MaxSim: the reference of the tests of MultiVectorIndex."""

import numpy as np


def drawn_items(count, dimension, dtype, seed=0, longest=30):
    """Return items around common centres, as tokens are: some of 1 token, some of `longest`."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(40, dimension))
    items = []
    for _ in range(count):
        length = int(random.choice([1, 2, longest, random.integers(1, longest + 1)]))
        topics = centres[random.choice(40, 3)]
        tokens = topics[random.integers(0, 3, length)] + 0.5 * random.normal(size=(length, dimension))
        if np.dtype(dtype).kind == "f":
            items.append(tokens.astype(dtype))
        else:
            low, high = (0, 255) if dtype == "uint8" else (-128, 127)
            items.append(np.clip(np.rint(25 * tokens + (low + high + 1) // 2), low, high).astype(dtype))
    return items


def exact_scores(query, items):
    """Return MaxSim of each item, float64."""
    wanted = np.asarray(query, np.float64)
    return np.array([(np.asarray(item, np.float64) @ wanted.T).max(axis=0).sum() for item in items])


def best_of(query, items, k, ids=None):
    """Return ids and scores of the best items; of equal scores, the smaller ids."""
    scores = exact_scores(query, items)
    names = np.arange(len(items)) if ids is None else np.asarray(list(ids))
    order = np.lexsort((names, -scores))[:k]
    return names[order], scores[order]


def assert_best(found, query, model, k):
    """Assert that a result holds the best items of a model `{id: tokens}`; near ties may stand in either order."""
    names, best = best_of(query, list(model.values()), k, model.keys())
    kept = found.ids[found.ids >= 0]
    assert len(kept) == len(names)
    assert len(set(kept.tolist())) == len(kept)
    np.testing.assert_allclose(found.scores[: len(kept)], best, rtol=1e-4, atol=1e-4 * np.abs(best).max(initial=1e-30))
    own = exact_scores(query, [model[name] for name in kept.tolist()])
    np.testing.assert_allclose(own, found.scores[: len(kept)], rtol=1e-4, atol=1e-4 * np.abs(best).max(initial=1e-30))
    assert (found.ids[len(kept) :] == -1).all()
    assert np.isneginf(found.scores[len(kept) :]).all()

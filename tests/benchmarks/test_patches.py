"""Streamed patches: a longer stream begins with the shorter, axes are those of the data, and queries are held out."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pytest

from memhier.benchmarks import datasets, patches
from memhier.benchmarks.patches import PatchStream


@pytest.fixture(autouse=True, scope="module")
def photographs() -> Iterator[None]:
    """Photographs that are decoded once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patches, "load_images", lru_cache(datasets.load_images))
        yield


def stream(n: int, d: int = 16, seed: int = 3, white: bool = False) -> PatchStream:
    try:
        return PatchStream(n, d, seed, white)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_a_longer_stream_begins_with_the_shorter() -> None:
    long, short = (np.concatenate([*stream(n).blocks()]) for n in (20_000, 17))
    assert long.shape == (20_000, 16)
    assert long.dtype == np.float32
    assert np.array_equal(long[:17], short)


def test_axes_are_principal_and_white_ones_alike() -> None:
    plain, white = (np.concatenate([*stream(40_000, white=white).blocks()]) for white in (False, True))
    covariance = np.cov(plain.T)
    variances = covariance.diagonal()
    assert np.all(variances[1:] < 1.1 * variances[:-1])
    assert np.abs(covariance - np.diag(covariance.diagonal())).max() < 0.02 * covariance[0, 0]
    assert np.allclose(white.var(axis=0), 1, rtol=0.1)


def test_queries_are_of_other_photographs_and_seeds_differ() -> None:
    one, other = stream(100), stream(100, seed=4)
    base, queries = next(one.blocks()), one.queries(9)
    assert queries.shape == (9, 16)
    assert np.linalg.norm(base[:, None] - queries, axis=2).min() > 0
    assert not np.array_equal(base, next(other.blocks()))


@pytest.mark.parametrize(("n", "d", "named"), [(0, 8, "n=0"), (5, 0, "d=0"), (5, 193, "d=193")])
def test_numbers_out_of_range_are_named(n: int, d: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PatchStream(n, d, seed=0)

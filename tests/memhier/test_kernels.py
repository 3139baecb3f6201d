"""Checksums against the definition bit by bit, distances against float64, on both backends."""

import mmap
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memhier import backend
from memhier.io.kernels import METRICS, ROW_DTYPES, crc32c, crc32c_pages, distances

DIMENSIONS = (1, 3, 7, 8, 9, 31, 97, 128)


@pytest.fixture(params=["native", "python"], autouse=True)
def core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test on the compiled core and on its fallback."""
    if request.param == "native" and backend.core is None:
        pytest.skip("needs the compiled core")
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "python":
            patched.setattr(backend, "core", None)
        yield


both_backends = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def crc32c_by_definition(data: bytes, value: int = 0) -> int:
    state = value ^ 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


# Vectors of RFC 3720, B.4, and the check value of the algorithm's catalogue entry.
@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_checksums(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc
    if backend.core is not None:
        assert backend.core.crc32c_by_table(data=memoryview(data), value=0) == crc


@both_backends
@given(data=st.binary(max_size=600), value=st.integers(0, 2**32 - 1), cut=st.integers(0, 600))
def test_checksums_equal_the_definition_and_continue(data: bytes, value: int, cut: int) -> None:
    expected = crc32c_by_definition(data, value)
    assert crc32c(data, value) == expected
    assert crc32c(data[cut:], crc32c(data[:cut], value)) == expected
    if backend.core is not None:
        assert backend.core.crc32c_by_table(data=memoryview(data), value=value) == expected


@pytest.mark.parametrize("size", [4079, 4080, 4081, 4095, 4096, 4097, 8160, 12287, 20_001])
def test_checksums_of_long_data_at_any_alignment(size: int) -> None:
    data = np.random.default_rng(size).bytes(size + 8)
    for shift in (0, 1, 3):
        part = data[shift : shift + size]
        assert crc32c(memoryview(data)[shift : shift + size], 5) == crc32c_by_definition(part, 5)


@pytest.mark.parametrize("pages", [0, 1, 3, 97])
def test_checksums_of_pages(pages: int) -> None:
    data = np.random.default_rng(pages).integers(0, 256, pages * 4096, dtype=np.uint8)
    sums = crc32c_pages(data)
    assert sums.dtype == np.uint32
    assert sums.tolist() == [crc32c(page.tobytes()) for page in data.reshape(-1, 4096)]


def test_checksums_take_any_contiguous_buffer() -> None:
    with mmap.mmap(-1, 4096) as memory:
        memory[:4] = b"abcd"
        page = memory[:]
        assert crc32c(memory) == crc32c(page) == crc32c(np.frombuffer(page, np.float64).reshape(2, -1))
        assert crc32c_pages(memory).tolist() == [crc32c(page)]
    read_only = np.arange(3)
    read_only.flags.writeable = False
    assert crc32c(read_only) == crc32c(read_only.tobytes())


def test_bad_checksum_arguments() -> None:
    with pytest.raises(TypeError, match="data: expected bytes or an object with a buffer, got str"):
        crc32c("text")
    with pytest.raises(ValueError, match="data: expected contiguous"):
        crc32c(np.arange(10)[::2])
    with pytest.raises(ValueError, match="value=-1"):
        crc32c(b"", -1)
    with pytest.raises(ValueError, match="buffer: expected a multiple of 4096 bytes, got 5"):
        crc32c_pages(b"12345")


def make_rows(rng: np.random.Generator, name: str, count: int, dimension: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return rows as stored and as float64."""
    if name in ("int8", "uint8"):
        limits = np.iinfo(name)
        rows: NDArray[Any] = rng.integers(limits.min, limits.max + 1, (count, dimension)).astype(name)
        return rows, rows.astype(np.float64)
    values = rng.standard_normal((count, dimension)).astype(np.float32)
    if name == "bfloat16":
        rows = (values.view(np.uint32) >> 16).astype(np.uint16)
        return rows, (rows.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    rows = values.astype(name)
    return rows, rows.astype(np.float64)


def exact(queries: NDArray[Any], rows: NDArray[Any], metric: str) -> NDArray[np.float64]:
    """Distances in float64 by numpy, row by row."""
    q, x = queries.astype(np.float64), rows
    if metric == "l2":
        return np.asarray(((q - x) ** 2).sum(1))
    products = np.asarray((q * x).sum(1))
    if metric == "ip":
        return -products
    norms = np.linalg.norm(q, axis=1) * np.linalg.norm(x, axis=1)
    return 1 - np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)


@both_backends
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(ROW_DTYPES),
    metric=st.sampled_from(METRICS),
    dimension=st.sampled_from(DIMENSIONS),
    count=st.sampled_from([0, 1, 3, 97]),
    lead=st.sampled_from([0, 1, 4]),
    queries=st.sampled_from([1, 5]),
)
def test_distances_of_fields_in_records(
    seed: int, name: str, metric: str, dimension: int, count: int, lead: int, queries: int
) -> None:
    rng = np.random.default_rng(seed)
    stored, values = make_rows(rng, name, count, dimension)
    # A field behind `lead` bytes and before one: rows at odd addresses, an odd number of bytes apart.
    parts = [("row", stored.dtype, (dimension,)), ("rest", "u1")]
    records = np.zeros(count, np.dtype([("lead", f"S{lead}"), *parts] if lead else parts))
    records["row"] = stored
    query = rng.standard_normal((queries, dimension)).astype(np.float32)
    owner = rng.integers(0, queries, count).astype(np.int32) if queries > 1 else None
    compared = np.broadcast_to(query, (count, dimension)) if owner is None else query[owner]
    options = {"dtype": name, "query_of_row": owner}
    found = distances(query, records["row"].reshape(count, dimension), metric, **options)
    assert found.dtype == np.float32
    scale = (np.abs(compared) * np.abs(values)).sum(1) + (values**2).sum(1) if metric != "cosine" else np.ones(count)
    assert (np.abs(found - exact(compared, values, metric)) <= 1e-5 * (scale + 1)).all()
    if owner is None:
        np.testing.assert_array_equal(distances(query, stored[::-1], metric, dtype=name)[::-1], found)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_half_value_is_converted_exactly(name: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = (
        bits.view(np.float16).astype(np.float32) if name == "float16" else (bits.astype(np.uint32) << 16).view("f4")
    )
    rows = (bits.view(np.float16) if name == "float16" else bits)[:, None]
    expected = -values
    # Nine equal elements of which eight meet a zero: the vector body and its tail are both tried. A zero times an
    # infinity would be NaN, so those rows are left to the dimension of one.
    finite = np.isfinite(values)
    for dimension, chosen in ((1, slice(None)), (9, finite)):
        for place in (0, dimension - 1):
            query = np.zeros((1, dimension), np.float32)
            query[0, place] = 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, about the NaNs among the 65,536
                found = distances(query, np.repeat(rows[chosen], dimension, 1), "ip", dtype=name)
            np.testing.assert_array_equal(found, expected[chosen])


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("dimension", [1, 8, 15, 16, 17, 63, 97])
def test_the_portable_kernels_equal_the_intrinsic_ones(dtype: str, dimension: int) -> None:
    if backend.core is None:
        pytest.skip("needs the compiled core")
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 100, (50, dimension)) if dtype.endswith("int8") else rng.standard_normal((50, dimension))
    stored = rows.astype(np.float32).view(np.uint16)[:, 1::2] if dtype == "bfloat16" else rows.astype(dtype)
    stored = np.ascontiguousarray(stored)
    query = rng.standard_normal((1, dimension)).astype(np.float32)
    for index, metric in enumerate(METRICS):
        out = np.empty(50, np.float32)
        backend.core.distances(
            queries=query,
            rows=stored,
            dtype=ROW_DTYPES.index(dtype),
            metric=index,
            query_of_row=None,
            out=out,
            portable=True,
        )
        np.testing.assert_allclose(out, distances(query, stored, metric, dtype=dtype), rtol=1e-5, atol=1e-4)


def test_cosine_of_zero_and_of_huge_vectors() -> None:
    rows = np.array([[0, 0], [1e19, 0], [-3e-10, 0]], np.float32)
    assert distances(np.float32([[1e19, 0]]), rows, "cosine").tolist() == [1.0, 0.0, 2.0]
    assert distances(np.float32([[0, 0]]), rows, "cosine").tolist() == [1.0, 1.0, 1.0]


def test_out_is_filled_and_returned() -> None:
    rows = np.arange(12, dtype=np.int8).reshape(4, 3)
    out = np.full(4, np.nan, np.float32)
    assert distances(np.zeros(3, np.float32), rows, "l2", out=out) is out
    assert out.tolist() == [5, 50, 149, 302]
    assert distances(np.zeros((1, 6), np.float32)[:, ::2], rows, "ip").tolist() == [0, 0, 0, 0]
    assert distances(np.zeros((1, 0), np.float32), np.zeros((2, 0), np.int8), "l2").tolist() == [0, 0]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"metric": "l1"}, ValueError, "metric='l1': expected one of l2, ip, cosine"),
        ({"queries": np.zeros((2, 3))}, TypeError, "queries: expected a numpy array of float32, got float64"),
        ({"queries": np.zeros((1, 2, 3), np.float32)}, ValueError, "queries: expected shape"),
        ({"queries": np.zeros((2, 3), np.float32), "query_of_row": None}, ValueError, "there are 2 queries"),
        ({"rows": np.zeros((4, 2), np.float32)}, ValueError, r"rows: expected shape \[n, 3\].*\[4, 2\]"),
        ({"rows": np.zeros((4, 3))}, TypeError, "rows: expected one of.*float64"),
        ({"rows": np.zeros((4, 3), np.uint16)}, TypeError, "bfloat16"),
        ({"rows": np.zeros((4, 3), np.float32), "dtype": "bfloat16"}, TypeError, "bfloat16"),
        ({"rows": np.zeros((3, 4), np.float32).T}, ValueError, "next to each other"),
        ({"rows": [[1, 2, 3]]}, TypeError, "rows: expected a numpy array"),
        (
            {"query_of_row": np.zeros(4, np.int64)},
            TypeError,
            "query_of_row: expected a numpy array of int32, got int64",
        ),
        ({"query_of_row": np.zeros(3, np.int32)}, ValueError, r"query_of_row: expected shape \[4\]"),
        ({"query_of_row": np.int32([0, 1, 2, 0])}, ValueError, r"query_of_row\[2\]=2: expected 0 to 1"),
        ({"query_of_row": np.int32([0, -1, 0, 0])}, ValueError, r"query_of_row\[1\]=-1"),
        ({"out": np.zeros(5, np.float32)}, ValueError, r"out: expected float32 \[4\]"),
        ({"out": np.zeros(8, np.float32)[::2]}, ValueError, "out: expected a contiguous"),
    ],
)
def test_bad_distance_arguments(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    good = {
        "queries": np.zeros((2, 3), np.float32),
        "rows": np.zeros((4, 3), np.float32),
        "metric": "l2",
        "query_of_row": np.zeros(4, np.int32),
    }
    distances(**good)
    with pytest.raises(error, match=words):
        distances(**{**good, **changes})

"""Codecs against plain definitions: rounding, bounds, what cannot be held, and damaged records."""

import struct
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memhier.codecs import get_bytes_codec, get_codec
from memhier.codecs import rows as _row_codecs
from memhier.errors import CorruptionError

LOSSY = ["fp16", "bf16", "int8"]
MAX32 = float(np.finfo(np.float32).max)

any_float = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda bits: float(np.uint32(bits).view(np.float32))),
    st.floats(-70000, 70000, width=32),
    st.sampled_from(
        [0.0, -0.0, 65519.996, 65520.0, 2.0**-24, 2.0**-25, 2.0**-126, 1e-45, MAX32, -MAX32, np.inf, np.nan]
    ),
)
finite_float = any_float.filter(np.isfinite)


def matrices(elements: st.SearchStrategy[float]) -> st.SearchStrategy[NDArray[np.float32]]:
    return st.sampled_from([1, 3, 97]).flatmap(
        lambda dim: st.lists(st.lists(elements, min_size=3, max_size=3), max_size=5).map(
            lambda rows: (
                np.resize(np.array(rows, np.float32).reshape(-1, 3), (len(rows), dim))
                if rows
                else np.empty((0, dim), np.float32)
            )
        )
    )


def half_bits(number: float) -> int | None:
    """Half precision by Python's own rule; None where it overflows."""
    try:
        return int.from_bytes(struct.pack("<e", number), "little")
    except OverflowError:
        return None


def brain_bits(number: float) -> int | None:
    """The nearest bfloat16 by comparing distances; None where it overflows."""
    bits = struct.unpack("<I", struct.pack("<f", number))[0]
    low = bits >> 16
    if np.isinf(number) or bits & 0xFFFF == 0:
        return int(low)

    def value(upper: int) -> float:
        # One place past the largest number stands for 2**128, which is where rounding would have to go.
        if upper & 0x7FFF == 0x7F80:
            return (-1.0 if upper & 0x8000 else 1.0) * 2.0**128
        return float(struct.unpack("<f", struct.pack("<I", upper << 16))[0])

    below, above = abs(number - value(low)), abs(value(low + 1) - number)
    nearest = low if below < above or (below == above and low % 2 == 0) else low + 1
    return None if nearest & 0x7FFF == 0x7F80 else nearest


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["fp16", "bf16"]), matrices(any_float))
def test_halves_round_to_nearest_even(name: str, rows: NDArray[np.float32]) -> None:
    codec = get_codec(name)
    reference = half_bits if name == "fp16" else brain_bits
    expected = [None if np.isnan(x) else reference(x) for x in rows.ravel().tolist()]
    overflown = [i for i, (x, bits) in enumerate(zip(rows.flat, expected, strict=True)) if bits is None and x == x]
    if overflown:
        row, column = divmod(overflown[0], rows.shape[1])
        with pytest.raises(ValueError, match=rf"rows\[{row}, {column}\]=.* overflows {name}"):
            codec.encode(rows)
        return
    encoded = codec.encode(rows)
    assert encoded.shape == (len(rows), codec.encoded_bytes(np.float32, rows.shape[1]))
    decoded = codec.decode(encoded)
    assert decoded.dtype == np.float32
    assert (np.isnan(decoded) == np.isnan(rows)).all()
    whole = ~np.isnan(rows.ravel())
    assert encoded.view("<u2").ravel()[whole].tolist() == [bits for bits in expected if bits is not None]
    normal, subnormal, smallest = (2.0**-11, 2.0**-25, 2.0**-14) if name == "fp16" else (2.0**-8, 2.0**-134, 2.0**-126)
    exact, got = rows.ravel()[whole].astype(float), decoded.ravel()[whole].astype(float)
    finite = np.isfinite(exact)
    assert (got[~finite] == exact[~finite]).all()
    error = np.abs(got[finite] - exact[finite])
    size = np.abs(exact[finite])
    assert (error <= np.where(size >= smallest, normal * size, subnormal)).all()


@settings(max_examples=200, deadline=None)
@given(matrices(finite_float))
def test_int8_keeps_its_bound(rows: NDArray[np.float32]) -> None:
    codec = get_codec("int8")
    encoded = codec.encode(rows)
    assert encoded.shape == (len(rows), rows.shape[1] + 4)
    decoded = codec.decode(encoded)
    exact, got = rows.astype(float), decoded.astype(float)
    scale = np.maximum(np.abs(exact).max(axis=1, keepdims=True) / 127, 2.0**-126) if len(rows) else np.ones((0, 1))
    assert (np.abs(got - exact) <= 0.5001 * scale).all()
    assert (got[(exact == 0).all(axis=1)] == 0).all()
    # Encoding what was decoded changes nothing more where the scale has all its bits.
    sure = scale[:, 0] > 2.0**-120
    again = codec.decode(codec.encode(decoded[sure])).astype(float)
    assert (np.abs(again - got[sure]) <= 1e-6 * 127 * scale[sure]).all()


@settings(max_examples=200, deadline=None)
@given(matrices(any_float))
def test_int8_with_errors_keeps_its_bound_however_often_a_row_leaves(rows: NDArray[np.float32]) -> None:
    codec = get_codec("int8ef")
    encoded = codec.encode(rows)
    assert encoded.shape == (len(rows), 2 * rows.shape[1] + 4)
    got, finite = codec.decode(encoded), np.isfinite(rows)
    assert np.array_equal(got[~finite], rows[~finite], equal_nan=True)
    exact = np.where(finite, rows, 0).astype(float)
    bound = np.maximum(np.abs(exact).max(axis=1, keepdims=True) / 64000, 2.0**-126) if len(rows) else exact
    assert (np.abs(np.where(finite, got, 0) - exact) <= bound).all()
    for _ in range(20):
        got = codec.decode(codec.encode(got))
    assert (np.abs(np.where(finite, got, 0) - exact) <= bound).all()


def test_small_changes_add_up_where_errors_are_kept() -> None:
    change, found = 1 / 2000, {}
    for name in ("int8", "int8ef"):
        codec, row = get_codec(name), np.array([[1.0, 0.25]], np.float32)
        for _ in range(500):
            row = codec.decode(codec.encode(row + np.array([0, change], np.float32)))
        found[name] = float(row[0, 1])
    assert found["int8"] == pytest.approx(0.25, abs=1 / 254)
    assert found["int8ef"] == pytest.approx(0.25 + 500 * change, abs=0.01)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_int8_refuses_what_has_no_scale(bad: float) -> None:
    rows = np.ones((70_000, 3), np.float32)
    rows[66_000, 2] = bad
    with pytest.raises(ValueError, match=rf"rows\[66000, 2\]={bad}: int8 holds no infinity"):
        get_codec("int8").encode(rows)


def test_int8_by_hand() -> None:
    rows = np.array([[127.0, -126.4, 0.5, 1.5, 2.5], [0, 0, 0, 0, 0], [-2, 2, 1, -1, 0]], np.float32)
    encoded = get_codec("int8").encode(rows)
    assert encoded[:, :5].view(np.int8).tolist() == [[127, -126, 0, 2, 2], [0] * 5, [-127, 127, 64, -64, 0]]
    assert encoded[:, 5:].copy().view("<f4").ravel().tolist() == [1.0, 0.0, float(np.float32(2) / np.float32(127))]


@given(st.binary(max_size=60), st.sampled_from(["u1", "<f4", ">i2", "<f8", "S3"]))
def test_none_keeps_every_bit(data: bytes, dtype: str) -> None:
    codec = get_codec("none")
    itemsize = np.dtype(dtype).itemsize
    rows = np.frombuffer(data[: len(data) // (2 * itemsize) * 2 * itemsize], dtype).reshape(-1, 2)
    encoded = codec.encode(rows)
    assert encoded.tobytes() == rows.tobytes()
    assert encoded.shape == (len(rows), codec.encoded_bytes(dtype, 2))
    decoded = codec.decode(encoded, dtype=dtype)
    assert decoded.dtype == np.dtype(dtype)
    assert decoded.tobytes() == rows.tobytes()


@pytest.mark.parametrize("name", ["none", *LOSSY])
def test_blocks_layouts_and_given_arrays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = get_codec(name)
    wide = np.random.default_rng(0).standard_normal((97, 10)).astype(np.float32)
    whole = codec.encode(np.ascontiguousarray(wide[::2, ::3]))
    monkeypatch.setattr(_row_codecs, "_BLOCK_FLOATS", 12)
    assert (codec.encode(wide[::2, ::3]) == whole).all()
    width = codec.encoded_bytes(np.float32, 4)
    out = np.empty((49, width), np.uint8)
    assert codec.encode(wide[::2, ::3], out=out) is out
    assert (out == whole).all()
    # Rows as they lie in pages, with other bytes between them.
    page = np.zeros((49, width + 5), np.uint8)
    page[:, 3 : width + 3] = whole
    rows = np.empty((49, 4), np.float32)
    assert codec.decode(page[:, 3 : width + 3], out=rows) is rows
    assert (rows == codec.decode(whole)).all()
    for dim in (1, 3):
        assert codec.decode(codec.encode(np.empty((0, dim), np.float32))).shape == (0, dim)


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_codecs_take_float32(name: str) -> None:
    codec = get_codec(name)
    for dtype in (np.float64, np.float16, ">f4", np.int32):
        with pytest.raises(TypeError, match=f"codec '{name}' takes float32"):
            codec.encode(np.zeros((2, 3), dtype))
        with pytest.raises(TypeError, match=f"codec '{name}' takes float32"):
            codec.encoded_bytes(dtype, 3)
    encoded = codec.encode(np.zeros((2, 3), np.float32))
    with pytest.raises(TypeError, match="decodes to float32"):
        codec.decode(encoded, dtype=np.float64)
    with pytest.raises(TypeError, match="out: expected an array of float32"):
        codec.decode(encoded, out=np.empty((2, 3)))
    short = encoded[:, :1]
    with pytest.raises(ValueError, match="1 bytes are not the length of any row"):
        codec.decode(short)


@pytest.mark.parametrize("name", ["none", *LOSSY])
def test_unfit_arguments(name: str) -> None:
    codec = get_codec(name)
    rows = np.zeros((2, 3), np.float32)
    encoded = codec.encode(rows)
    for bad in (rows[0], rows[:, :0], rows[None]):
        with pytest.raises(ValueError, match=r"rows: expected shape \[n, dim\]"):
            codec.encode(bad)
    with pytest.raises(TypeError, match="rows: expected an array"):
        codec.encode([[1.0]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="data: expected uint8"):
        codec.decode(rows)  # type: ignore[arg-type]
    for width in (encoded.shape[1] + 1, 1):
        with pytest.raises(ValueError, match="out: expected shape"):
            codec.encode(rows, out=np.empty((2, width), np.uint8))
    with pytest.raises(ValueError, match="out: expected shape"):
        codec.decode(encoded, out=np.empty((2, 4), np.float32))
    with pytest.raises(ValueError, match="C-contiguous"):
        codec.decode(encoded, out=np.empty((2, 6), np.float32)[:, ::2])
    for dim, error in ((0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="dim="):
            codec.encoded_bytes(np.float32, dim)  # type: ignore[arg-type]


def test_none_needs_whole_elements_of_plain_bytes() -> None:
    codec = get_codec("none")
    with pytest.raises(ValueError, match=r"multiple of 4 bytes \(float32\), got 6"):
        codec.decode(np.zeros((2, 6), np.uint8))
    for dtype in ("O", "S0"):
        with pytest.raises(TypeError, match="plain bytes"):
            codec.encoded_bytes(dtype, 3)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"codec='zstd': expected one of 'none', 'fp16'.*get_bytes_codec"):
        get_codec("zstd")
    with pytest.raises(ValueError, match="codec='fp8'"):
        get_codec("fp8")
    with pytest.raises(ValueError, match="codec='int8': expected one of 'none', 'zstd'"):
        get_bytes_codec("int8")


def bytes_codec(name: str) -> Any:
    if name == "zstd":
        pytest.importorskip("zstandard")
    return get_bytes_codec(name)


@pytest.mark.parametrize("name", ["none", "zstd"])
def test_records_come_back(name: str) -> None:
    codec = bytes_codec(name)

    @given(st.one_of(st.binary(max_size=300), st.binary(max_size=20).map(lambda part: part * 500)))
    def check(data: bytes) -> None:
        packed = codec.encode(data)
        assert isinstance(packed, bytes)
        assert codec.decode(memoryview(bytearray(packed)), len(data)) == data
        if data:
            with pytest.raises(CorruptionError, match="expected at most"):
                codec.decode(packed, len(data) - 1)

    check()
    array = np.arange(30, dtype=">i2").reshape(5, 6)
    assert codec.decode(codec.encode(array), 1000) == array.tobytes()
    for call in (codec.encode, lambda data: codec.decode(data, 1000)):
        with pytest.raises(ValueError, match="data: expected C-contiguous"):
            call(array[:, ::2])
        with pytest.raises(TypeError, match=r"data: expected bytes .* got str"):
            call("text")


def test_zstd_packs() -> None:
    assert len(bytes_codec("zstd").encode(b"memory" * 1000)) < 100


def test_damaged_zstd_records() -> None:
    codec = bytes_codec("zstd")
    data = bytes(np.random.default_rng(0).integers(0, 4, 500, np.uint8))
    packed = codec.encode(data)
    for cut in range(len(packed)):
        with pytest.raises(CorruptionError):
            codec.decode(packed[:cut], 10_000)
    with pytest.raises(CorruptionError):
        codec.decode(packed + b"x", 10_000)
    for at in range(len(packed)):
        damaged = bytearray(packed)
        damaged[at] ^= 0x40
        # Without a checksum of its own a frame may decode to other bytes; pages carry one. It must not do worse.
        try:
            assert len(codec.decode(damaged, 10_000)) <= 10_000
        except CorruptionError:
            continue


def test_zstd_in_threads() -> None:
    codec = bytes_codec("zstd")
    records = [bytes([which]) * 5000 for which in range(8)]
    wrong: list[int] = []

    def work(which: int) -> None:
        wrong.extend(which for _ in range(50) if codec.decode(codec.encode(records[which]), 5000) != records[which])

    threads = [threading.Thread(target=work, args=(which,)) for which in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_zstd_missing_names_the_extra() -> None:
    code = """
import sys
sys.modules["zstandard"] = None
from memhier.codecs import get_bytes_codec
try:
    get_bytes_codec("zstd")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'memhier[zstd]'" in done.stdout

"""CRC32C and distances in numpy, for machines without the compiled core: the same calls with the same arguments."""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.io.page_file import PAGE_BYTES

__all__ = ["METRICS", "ROW_DTYPES", "crc32c", "crc32c_pages", "distances"]

METRICS = ("l2", "ip", "cosine")
ROW_DTYPES = ("float32", "float16", "bfloat16", "int8", "uint8")

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed, as SSE4.2 and iSCSI use it
_CHUNK = 64  # a page is 64 chunks of 64 bytes: two tables of 64 KiB and 256 KiB instead of one of 4 MiB
_BLOCK_FLOATS = 1 << 18  # rows are turned to float32 in blocks of 1 MiB


@functools.cache
def _byte_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ _POLYNOMIAL, table >> 1).astype(np.uint32)
    return table


def _append_zeros(states: NDArray[np.uint32], count: int) -> NDArray[np.uint32]:
    """Advance CRC states over `count` zero bytes."""
    table = _byte_table()
    for _ in range(count):
        states = table[states & 0xFF] ^ (states >> 8)
    return states


@functools.cache
def _page_tables() -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Contributions of a byte by its place in a chunk, of a chunk's CRC by its place in a page, and of a page's CRC.

    CRC is linear over XOR, so a page's CRC is the XOR of the CRCs that its bytes have alone.
    """
    within = np.empty((_CHUNK, 256), np.uint32)
    within[-1] = _byte_table()
    for place in range(_CHUNK - 2, -1, -1):
        within[place] = _append_zeros(within[place + 1], 1)
    lanes = np.arange(256, dtype=np.uint32) << np.array([[0], [8], [16], [24]], np.uint32)
    between = np.empty((_CHUNK, 4, 256), np.uint32)
    between[-1] = lanes
    for place in range(_CHUNK - 2, -1, -1):
        between[place] = _append_zeros(between[place + 1], _CHUNK)
    return within, between, _append_zeros(between[0], _CHUNK)


def _raw_page_crcs(pages: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """CRC of each page from a zero state, without the final inversion."""
    within, between, _ = _page_tables()
    chunks = pages.reshape(-1, _CHUNK, _CHUNK)
    chunk_crcs = np.bitwise_xor.reduce(within[np.arange(_CHUNK), chunks], axis=2)
    parts = chunk_crcs[:, :, None] >> np.array([0, 8, 16, 24], np.uint32) & 0xFF
    contributions = between[np.arange(_CHUNK)[:, None], np.arange(4), parts]
    crcs = np.bitwise_xor.reduce(contributions, axis=(1, 2), dtype=np.uint32)
    return np.asarray(crcs, np.uint32)


def _page_states(pages: NDArray[np.uint8], state: int) -> int:
    table = _page_tables()[2]
    for raw in _raw_page_crcs(pages).tolist():
        advanced = (
            table[0, state & 255] ^ table[1, state >> 8 & 255] ^ table[2, state >> 16 & 255] ^ table[3, state >> 24]
        )
        state = int(advanced) ^ raw
    return state


def crc32c(*, data: NDArray[Any] | memoryview, value: int) -> int:
    """CRC32C of bytes, continuing from `value`."""
    state = value ^ 0xFFFFFFFF
    buffer = np.frombuffer(data, np.uint8)
    whole = len(buffer) // PAGE_BYTES * PAGE_BYTES
    for start in range(0, whole, 64 * PAGE_BYTES):
        state = _page_states(buffer[start : min(start + 64 * PAGE_BYTES, whole)].reshape(-1, PAGE_BYTES), state)
    table = _byte_table()
    rest = buffer[whole:]
    if len(rest) < 64:
        for byte in rest.tolist():
            state = int(table[(state ^ byte) & 0xFF]) ^ (state >> 8)
        return state ^ 0xFFFFFFFF
    # Zeros in front leave a zero state as it is, so the rest counts as a page once the state is folded into its bytes.
    page = np.zeros(PAGE_BYTES, np.uint8)
    page[PAGE_BYTES - len(rest) :] = rest
    head = slice(PAGE_BYTES - len(rest), PAGE_BYTES - len(rest) + 4)
    page[head] ^= np.frombuffer(state.to_bytes(4, "little"), np.uint8)
    return int(_raw_page_crcs(page)[0]) ^ 0xFFFFFFFF


@functools.cache
def _empty_state() -> int:
    """Return the term that the initial all-ones state and the final inversion add to a page's CRC."""
    return crc32c(data=np.zeros(PAGE_BYTES, np.uint8), value=0)


def crc32c_pages(*, data: NDArray[Any] | memoryview, out: NDArray[np.uint32]) -> None:
    """Fill `out` with the CRC32C of each 4096-byte page."""
    pages = np.frombuffer(data, np.uint8)
    for start in range(0, len(out), 64):
        out[start : start + 64] = _raw_page_crcs(pages[start * PAGE_BYTES : (start + 64) * PAGE_BYTES])
    out ^= np.uint32(_empty_state())


def _as_float32(rows: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return rows as float32; bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32)


def distances(
    *,
    queries: NDArray[np.float32],
    rows: NDArray[Any],
    dtype: int,
    metric: int,
    query_of_row: NDArray[np.int32] | None,
    out: NDArray[np.float32],
    portable: bool = False,
) -> None:
    """Fill ``out[i]`` with the distance of row i to its query; `dtype` and `metric` index the tuples above."""
    type_name, metric_name = ROW_DTYPES[dtype], METRICS[metric]
    step = max(1, _BLOCK_FLOATS // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        block = slice(start, start + step)
        values = _as_float32(rows[block], type_name)
        against = queries if query_of_row is None else queries[query_of_row[block]]
        if metric_name == "l2":
            np.subtract(values, against, out=values)
            np.einsum("ij,ij->i", values, values, out=out[block])
            continue
        products = np.einsum("ij,ij->i", values, np.broadcast_to(against, values.shape))
        if metric_name == "ip":
            out[block] = -products
            continue
        norms = np.sqrt(np.einsum("ij,ij->i", values, values)) * np.sqrt(np.einsum("ij,ij->i", against, against))
        out[block] = 1 - np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)

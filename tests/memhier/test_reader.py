"""The page reader against plain slices of the files' bytes: every engine, any offsets, lengths and layouts."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memhier import backend
from memhier.errors import ClosedError, CorruptionError
from memhier.io.kernels import crc32c_pages
from memhier.io.read_arguments import READ_TALLY
from memhier.io.reader import ENGINES, PAGE_BYTES, Reader

# Sizes around a block and a page, and one that is longer than a merged read.
SIZES = (1, 511, 4096, 4097, 5 * 4096, 97 * 4096 + 1234)


@dataclass
class Library:
    """Files of known bytes, open in one reader."""

    reader: Reader
    contents: list[bytes]
    handles: list[int]
    run_pages: int

    def expected(self, files: list[int], offsets: list[int], length: int) -> NDArray[np.uint8]:
        rows = [self.contents[file][offset : offset + length] for file, offset in zip(files, offsets, strict=True)]
        return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), length)


def open_reader(engine: str, **options: object) -> Reader:
    """Open a reader, or skip the test where this machine or backend does not have the engine."""
    if engine != "python" and backend.core is None:
        pytest.skip("needs the compiled core")
    try:
        return Reader(engine, **options)  # type: ignore[arg-type]
    except OSError as error:
        pytest.skip(f"no {engine} here: {error}")


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, bytes]]:
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(7)
    files = []
    for size in SIZES:
        path = folder / f"{size}.bin"
        path.write_bytes(rng.bytes(size))
        files.append((path, path.read_bytes()))
    return files


WAYS = ((None, True, 16), (False, False, 16), (None, True, 32))  # direct, with checksums, pages of the longest read


@pytest.fixture(scope="module", params=[(engine, *way) for engine in ENGINES for way in WAYS], ids=str)
def library(request: pytest.FixtureRequest, contents: list[tuple[Path, bytes]]) -> Iterator[Library]:
    engine, direct, with_checksums, run_pages = request.param
    with open_reader(engine, depth=7, direct=direct, run_pages=run_pages) as reader:
        handles = []
        for path, content in contents:
            padded = content + bytes(-len(content) % PAGE_BYTES)
            handles.append(reader.add(path, checksums=crc32c_pages(padded) if with_checksums else None))
        assert reader.engine == engine
        yield Library(reader, [content for _, content in contents], handles, run_pages)


@st.composite
def requests(draw: st.DrawFn, sizes: tuple[int, ...] = SIZES) -> tuple[list[int], list[int], int]:
    """Draw files, offsets and a length; offsets crowd, repeat, and reach both ends."""
    length = draw(st.one_of(st.integers(1, 300), st.sampled_from([4095, 4096, 4097, 8192, 70000])))
    possible = [index for index, size in enumerate(sizes) if size >= length]
    files = draw(st.lists(st.sampled_from(possible), max_size=60))
    offsets = []
    for file in files:
        room = sizes[file] - length
        near = st.integers(0, min(room, 9000))
        pages = st.integers(0, room // PAGE_BYTES).map(lambda page: page * PAGE_BYTES)
        offsets.append(draw(st.one_of(st.integers(0, room), near, pages, st.just(0), st.just(room))))
    return files, offsets, length


def expected_reads(library: Library, files: list[int], offsets: list[int], length: int) -> tuple[int, int]:
    """Count the pages and the merged reads that a batch needs, by a set of pages."""
    pages = {
        (file, page)
        for file, offset in zip(files, offsets, strict=True)
        for page in range(offset // PAGE_BYTES, (offset + length - 1) // PAGE_BYTES + 1)
    }
    reads = 0
    run = 0
    for file, page in sorted(pages):
        run = run + 1 if (file, page - 1) in pages and run < library.run_pages else 1
        reads += run == 1
    return len(pages), reads


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=requests())
def test_batches_equal_slices_and_read_each_page_once(library: Library, case: tuple[list[int], list[int], int]) -> None:
    files, offsets, length = case
    before = library.reader.stats()
    handles = np.array([library.handles[file] for file in files], np.int32)
    rows = library.reader.read(handles, np.array(offsets, np.int64), length)
    np.testing.assert_array_equal(rows, library.expected(files, offsets, length))
    after = library.reader.stats()
    pages, reads = expected_reads(library, files, offsets, length)
    assert after["pages"] - before["pages"] == pages
    assert after["reads"] - before["reads"] == reads
    assert after["requests"] - before["requests"] == len(files)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shift=st.sampled_from([0, 1, 512]),
    length=st.sampled_from([97, 4096, 3 * 4096, 3 * 4096 + 512, 73 * 1024]),
    step=st.sampled_from([17, 512]),
)
def test_out_and_latency_are_filled(library: Library, seed: int, shift: int, length: int, step: int) -> None:
    rng = np.random.default_rng(seed)
    last = len(SIZES) - 1
    offsets = rng.integers(0, (SIZES[last] - length) // 4096, 40) * 4096 + rng.integers(0, 2, 40) * step
    memory = np.zeros(PAGE_BYTES * 2 + 40 * length, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES + shift  # on a page boundary, where reads land in place, and off it
    out = memory[start : start + 40 * length].reshape(40, length)
    latency = np.full(40, np.nan, np.float32)
    assert library.reader.read(library.handles[last], offsets, length, out, latency) is out
    np.testing.assert_array_equal(out, library.expected([last] * 40, offsets.tolist(), length))
    assert memory[:start].sum() == 0
    assert memory[start + out.size :].sum() == 0
    assert (latency > 0).all()


@pytest.mark.skipif(backend.core is None, reason="the engine in Python copies every page")
def test_whole_pages_land_in_rows_that_are_no_multiple_of_a_page(tmp_path: Path) -> None:
    """A row of which one page is damaged has the others, which nothing has copied there."""
    path = tmp_path / "file"
    content = np.random.default_rng(0).integers(1, 256, 4 * PAGE_BYTES, np.uint8)
    path.write_bytes(content.tobytes())
    checksums = crc32c_pages(content)
    checksums[1] ^= 1
    offset, length = 512, 3 * PAGE_BYTES + 512
    memory = np.zeros(2 * PAGE_BYTES + length, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES + 512
    out = memory[start : start + length].reshape(1, length)
    with Reader(direct=False) as reader:
        handle = reader.add(path, checksums=checksums)
        with pytest.raises(CorruptionError):
            reader.read(handle, [offset], length, out)
    whole = slice(2 * PAGE_BYTES - offset, 3 * PAGE_BYTES - offset)
    np.testing.assert_array_equal(out[0, whole], content[2 * PAGE_BYTES : 3 * PAGE_BYTES])
    assert not out[0, : PAGE_BYTES - offset].any()


def test_more_requests_than_are_planned_at_a_time(library: Library) -> None:
    rng = np.random.default_rng(3)
    last = len(SIZES) - 1
    offsets = rng.integers(0, SIZES[last] - 3, 40_000)
    rows = library.reader.read(library.handles[last], offsets, 3)
    content = np.frombuffer(library.contents[last], np.uint8)
    np.testing.assert_array_equal(rows, content[offsets[:, None] + np.arange(3)])


def test_empty_batches(library: Library) -> None:
    assert library.reader.read(library.handles[0], np.empty(0, np.int64), 9).shape == (0, 9)
    assert library.reader.read(library.handles[0], [], 4096).shape == (0, 4096)
    assert library.reader.read(np.empty(0, np.int32), np.empty(0, np.int64), 1).shape == (0, 1)


def test_offsets_of_other_integers_and_strides(library: Library) -> None:
    offsets = np.arange(0, 200, dtype=np.int32)[::-3]
    rows = library.reader.read(library.handles[-1], offsets, 5)
    np.testing.assert_array_equal(rows, library.expected([-1] * len(offsets), offsets.tolist(), 5))


@pytest.mark.parametrize("contexts", [1, 4, 8])
@pytest.mark.parametrize("engine", ENGINES)
def test_many_threads_share_a_reader(engine: str, contents: list[tuple[Path, bytes]], contexts: int) -> None:
    path, content = contents[-1]
    failures: list[str] = []
    with open_reader(engine, depth=16, contexts=contexts) as reader:
        handle = reader.add(path)
        planned = reader.planned_bytes

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(30):
                length = int(rng.integers(1, 9000))
                offsets = rng.integers(0, len(content) - length, int(rng.integers(1, 50)))
                rows = reader.read(handle, offsets, length)
                if any(row.tobytes() != content[at : at + length] for row, at in zip(rows, offsets, strict=True)):
                    failures.append(f"seed {seed}")

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert reader.stats()["calls"] == 240
        assert reader.memory_bytes <= contexts * planned


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_is_small_and_does_not_grow_with_the_batch(engine: str, contents: list[tuple[Path, bytes]]) -> None:
    with open_reader(engine) as reader:
        handle = reader.add(contents[-1][0])
        limit = reader.planned_bytes
        assert reader.memory_bytes <= limit < 3 << 20
        for count in (1, 100, 50_000):
            reader.read(handle, np.zeros(count, np.int64), 64)
            assert reader.memory_bytes <= limit
        reader.close()
        assert reader.memory_bytes < limit


@pytest.mark.parametrize("engine", ENGINES)
def test_files_grow_and_go(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    with open_reader(engine) as reader:
        handle = reader.add(path)
        with pytest.raises(ValueError, match=r"offsets\[0\]=0 with length=1.*0 bytes"):
            reader.read(handle, [0], 1)
        content = b""
        for size in (3, 4096, 4097, 20000):
            with path.open("ab") as file:
                file.write(os.urandom(size - len(content)) + b"a writer's bytes, not committed yet")
            content = path.read_bytes()[:size]
            reader.extend(handle, size, crc32c_pages(content + bytes(-size % PAGE_BYTES)))
            assert reader.read(handle, [0], size).tobytes() == content
            with pytest.raises(ValueError, match="expected a range within"):
                reader.read(handle, [0], size + 1)
            os.truncate(path, size)
        with pytest.raises(ValueError, match="expected no fewer"):
            reader.extend(handle, 9)
        other = reader.add(path, length=10)
        assert other != handle
        reader.remove(handle)
        assert reader.read(other, [9], 1).tobytes() == content[9:10]
        for use in (
            lambda: reader.read(handle, [0], 1),
            lambda: reader.remove(handle),
            lambda: reader.extend(handle, 1),
        ):
            with pytest.raises(ValueError, match="handle from add"):
                use()
        with pytest.raises(ValueError, match="handle from add"):
            reader.read(np.array([other, handle], np.int32), np.zeros(2, np.int64), 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_handles_of_removed_files_are_given_again(engine: str, tmp_path: Path) -> None:
    """So that files which come and go take no memory; a batch on its way reads the file that it began with."""
    paths = [tmp_path / str(number) for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * PAGE_BYTES)
    with open_reader(engine) as reader:
        first, kept = reader.add(paths[0]), reader.add(paths[1])
        there = reader.memory_bytes
        for _ in range(500):
            reader.remove(first)
            first = reader.add(paths[2])
            assert first != kept
        assert reader.memory_bytes == there
        rows = reader.read(np.array([first, kept], np.int32), np.zeros(2, np.int64), 3)
        assert rows.tolist() == [[2] * 3, [1] * 3]
        another = reader.add(paths[0])
        assert another not in (first, kept)
        assert reader.stats()["files"] == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_closing(engine: str, contents: list[tuple[Path, bytes]]) -> None:
    reader = open_reader(engine)
    handle = reader.add(contents[-1][0])
    started = threading.Event()
    outcomes: list[str] = []

    def work() -> None:
        try:
            while True:
                reader.read(handle, np.arange(0, 300_000, 4096), 4096)
                started.set()
        except ClosedError:
            outcomes.append("closed")

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    started.wait()
    reader.close()
    reader.close()
    for thread in threads:
        thread.join()
    assert outcomes == ["closed"] * 6
    for use in (
        lambda: reader.read(handle, [0], 1),
        lambda: reader.add(contents[0][0]),
        lambda: reader.remove(handle),
        lambda: reader.extend(handle, 1),
        reader.__enter__,
    ):
        with pytest.raises(ClosedError):
            use()
    assert reader.engine == engine
    assert "closed" in repr(reader)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tally_counts_its_own_call_alone(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(64 * 4096))
    with open_reader(engine) as reader:
        handle = reader.add(path)
        tally = np.zeros(3, np.int64)
        reader.read(handle, [0, 10, 40 * 4096], 8, tally=tally)
        assert tally.tolist() == [2, 2, 2 * 4096]
        reader.read(handle, [4095], 2)
        reader.read(handle, [4095], 2, tally=tally)
        assert tally.tolist() == [3, 4, 4 * 4096]
        record = tally.view(READ_TALLY)
        reader.read(handle, [0], 8, tally=record)
        assert record[0].item() == (4, 5, 5 * 4096)
        counts = reader.stats()
        assert [counts[name] for name in ("reads", "pages", "bytes")] == [5, 7, 7 * 4096]
        for wrong in (np.zeros(2, np.int64), np.zeros(2, READ_TALLY)):
            with pytest.raises(ValueError, match="tally"):
                reader.read(handle, [0], 1, tally=wrong)


@pytest.mark.skipif(backend.core is None, reason="needs the compiled core")
def test_files_that_were_removed_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE_BYTES))
    with Reader() as reader:
        kept = [reader.add(path) for _ in range(200)]
        there = reader.memory_bytes
        for handle in kept:
            reader.remove(handle)
        assert reader.memory_bytes < there - 200 * 64

"""Pages that a reader holds in DRAM: the same bytes and errors as without them, and fewer reads."""

import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.errors import CorruptionError
from memhier.io.kernels import crc32c_pages
from memhier.io.reader import PAGE_BYTES, Reader

PAGES = 60
SIZE = PAGES * PAGE_BYTES - 1000

engines = pytest.mark.parametrize("engine", ["native", "python"])


def _reader(engine: str) -> Reader:
    if engine == "native" and backend.core is None:
        pytest.skip("needs the compiled core")
    return Reader("threads" if engine == "native" else "python", depth=8)


def _file(path: Path, seed: int = 0) -> tuple[bytes, Any]:
    contents = np.random.default_rng(seed).bytes(SIZE)
    path.write_bytes(contents)
    padded = np.frombuffer(contents.ljust(PAGES * PAGE_BYTES, bytes(1)), np.uint8)
    return contents, crc32c_pages(padded)


@engines
@given(
    room=st.sampled_from([1, 7, PAGES, 2 * PAGES]),
    length=st.sampled_from([1, 100, 4095, 4096, 5000, 20_000]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_do_not_depend_on_the_pages_held(tmp_path: Path, engine: str, room: int, length: int, seed: int) -> None:
    contents, sums = _file(tmp_path / "file")
    random = np.random.default_rng(seed)
    with _reader(engine) as reader:
        held, plain = reader.add(tmp_path / "file", SIZE, sums, held=True), reader.add(tmp_path / "file", SIZE, sums)
        reader.hold_pages(room)
        for step in range(6):
            offsets = random.integers(0, SIZE - length + 1, 20)
            files = random.choice(np.array([held, plain], np.int32), 20)
            expected = [contents[at : at + length] for at in offsets.tolist()]
            assert [bytes(row) for row in reader.read(files, offsets, length)] == expected
            assert reader.stats()["pool_pages"] <= room
            if step == 3:
                reader.hold_pages(max(1, room // 2))
        assert reader.memory_bytes >= reader.pool_bytes >= max(1, room // 2) * PAGE_BYTES


@engines
def test_pages_that_were_read_are_not_read_again(tmp_path: Path, engine: str) -> None:
    _, sums = _file(tmp_path / "file")
    with _reader(engine) as reader:
        file = reader.add(tmp_path / "file", SIZE, sums, held=True)
        assert reader.holdable_pages == PAGES
        reader.hold_pages(PAGES)
        every = np.arange(PAGES - 1) * PAGE_BYTES + 5
        reader.read(file, every, 3000)
        before = reader.stats()
        for _ in range(3):
            reader.read(file, every, 3000)
        after = reader.stats()
        assert after["pages"] == before["pages"] == PAGES - 1
        assert after["pool_hits"] - before["pool_hits"] == 3 * (PAGES - 1)
        reader.hold_pages(0)
        assert reader.pool_bytes == reader.stats()["pool_pages"] == 0
        reader.read(file, every, 3000)
        assert reader.stats()["pages"] == 2 * (PAGES - 1)


@engines
def test_a_damaged_page_is_found_when_it_is_read_and_never_enters(tmp_path: Path, engine: str) -> None:
    contents, sums = _file(tmp_path / "file")
    damaged = bytearray(contents)
    damaged[7 * PAGE_BYTES + 9] ^= 1
    (tmp_path / "file").write_bytes(damaged)
    with _reader(engine) as reader:
        file = reader.add(tmp_path / "file", SIZE, sums, held=True)
        reader.hold_pages(PAGES)
        for _ in range(2):
            with pytest.raises(CorruptionError):
                reader.read(file, [7 * PAGE_BYTES], 100)
        assert reader.stats()["pool_pages"] == 0


@engines
def test_the_next_file_with_a_handle_has_its_own_pages(tmp_path: Path, engine: str) -> None:
    first, _ = _file(tmp_path / "first", 1)
    second, _ = _file(tmp_path / "second", 2)
    with _reader(engine) as reader:
        reader.hold_pages(PAGES)
        reader.hold_pages(0)
        reader.hold_pages(PAGES)
        handle = reader.add(tmp_path / "first", held=True)
        assert bytes(reader.read(handle, [0], 50)[0]) == first[:50]
        assert reader.stats()["pool_pages"] == 1
        reader.remove(handle)
        assert reader.stats()["pool_pages"] == 0
        assert reader.add(tmp_path / "second", held=True) == handle
        assert bytes(reader.read(handle, [0], 50)[0]) == second[:50]


@engines
def test_a_file_that_grows_shows_its_new_bytes(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 100)
    with _reader(engine) as reader:
        reader.hold_pages(8)
        handle = reader.add(path, held=True)
        reader.read(handle, [0], 100)
        path.write_bytes(b"a" * 100 + b"b" * 100)
        reader.extend(handle, 200)
        assert bytes(reader.read(handle, [50], 100)[0]) == b"a" * 50 + b"b" * 50


@engines
def test_threads_share_the_pages_while_files_come_and_go(tmp_path: Path, engine: str) -> None:
    contents = [_file(tmp_path / str(number), number)[0] for number in range(3)]
    wrong: list[str] = []
    with _reader(engine) as reader:
        reader.hold_pages(PAGES)
        steady = reader.add(tmp_path / "0", held=True)

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(100):
                offsets = random.integers(0, SIZE - 300, 30)
                rows = reader.read(steady, offsets, 300)
                expected = [contents[0][at : at + 300] for at in offsets.tolist()]
                if [bytes(row) for row in rows] != expected:
                    wrong.append(f"thread {seed}")

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for step in range(60):
            handle = reader.add(tmp_path / str(1 + step % 2), held=True)
            offsets = np.arange(40) * PAGE_BYTES
            rows = reader.read(handle, offsets, 300)
            assert bytes(rows[7]) == contents[1 + step % 2][7 * PAGE_BYTES : 7 * PAGE_BYTES + 300]
            reader.remove(handle)
            reader.hold_pages(10 + step % 3 * 25)
        for thread in threads:
            thread.join()
    assert wrong == []


@engines
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_after_a_fork_has_pages_of_its_own(tmp_path: Path, engine: str) -> None:
    contents, _ = _file(tmp_path / "file")
    with _reader(engine) as reader:
        handle = reader.add(tmp_path / "file", held=True)
        reader.hold_pages(PAGES)
        reader.read(handle, [0, 5000], 100)

        def read() -> None:
            assert bytes(reader.read(handle, [5000], 100)[0]) == contents[5000:5100]
            assert reader.stats()["pool_pages"] == 1

        child = multiprocessing.get_context("fork").Process(target=read)
        child.start()
        child.join()
        assert child.exitcode == 0
        assert reader.stats()["pool_pages"] == 2

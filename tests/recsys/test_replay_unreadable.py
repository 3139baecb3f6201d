"""Pages that the drive cannot read: their samples are left out and named once, as it is where a checksum is wrong."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.errors import CorruptionError, FormatError
from memhier.io.reader import Reader
from memhier.recsys.replay import CarouselBuffer, StoredSamples
from memhier.recsys.replay.transitions.buffer import TransitionBuffer

PAGE = {"x": ("int64", 512)}  # a page each


@contextmanager
def bad_page(number: int, name: str) -> Iterator[None]:
    """Let reads of a page of segments whose names begin so fail with EIO."""
    real_read, real_add = Reader.read, Reader.add
    handles: set[int] = set()

    def add(reader: Reader, path: Any, *rest: Any, **options: Any) -> int:
        handle = real_add(reader, path, *rest, **options)
        (handles.add if Path(path).name.startswith(name) else handles.discard)(handle)
        return handle

    def read(reader: Reader, file: Any, offsets: Any, length: int, *rest: Any, **options: Any) -> Any:
        starts = np.asarray(offsets)
        of_file = np.isin(np.broadcast_to(file, starts.shape), [*handles])
        if (of_file & (starts // 4096 <= number) & ((starts + length - 1) // 4096 >= number)).any():
            raise OSError(errno.EIO, "Input/output error", name)
        return real_read(reader, file, offsets, length, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "add", add)
        patch.setattr(Reader, "read", read)
        yield


def filled(place: Path) -> None:
    with CarouselBuffer(place, memory=60, schema=PAGE, seed=2) as buffer:
        buffer.add({"x": np.repeat(np.arange(60), 512).reshape(60, 512)}, ids=100 + np.arange(60))
        buffer.checkpoint()


def test_a_buffer_opens_without_the_samples_of_a_bad_page(tmp_path: Path) -> None:
    filled(tmp_path / "b")
    with bad_page(7, "samples-"), pytest.warns(RuntimeWarning, match=r"ids \[107\] are damaged"):
        buffer = CarouselBuffer.open(tmp_path / "b")
    with buffer:
        batch = buffer.sample(60)
        assert sorted(batch.ids) == [*range(100, 107), *range(108, 160)]
        assert (batch["x"] == (batch.ids - 100)[:, None]).all()


@pytest.mark.parametrize("bad", [True, False], ids=["read", "checksum"])
def test_stored_samples_give_all_that_is_whole(tmp_path: Path, bad: bool) -> None:
    filled(tmp_path / "b")
    if not bad:
        victim = next((tmp_path / "b" / "segments").glob("samples-0.*"))
        data = bytearray(victim.read_bytes())
        data[4096 * 7] ^= 1
        victim.write_bytes(data)
    with bad_page(7 if bad else -1, "samples-"), StoredSamples(tmp_path / "b") as stored:
        with pytest.raises(OSError if bad else CorruptionError):
            [*stored.blocks(25)]
        with pytest.warns(RuntimeWarning, match=r"ids \[107\] are damaged and were left out") as told:
            blocks = [*stored.blocks(25, whole=True)]
        assert len(told) == 1
        assert [len(block) for block in blocks] == [24, 25, 10]
        for block in blocks:
            assert (block["x"] == (block.ids - 100)[:, None]).all()
            assert np.array_equal(stored.ids[block.slots], block.ids)


def test_a_batch_of_a_bad_page_tells_once(tmp_path: Path) -> None:
    settings: Any = {"capacity": 3000, "schema": PAGE, "dram": "1MiB", "batch": 8, "seed": 1}
    with bad_page(3, "rows-0"), TransitionBuffer(tmp_path / "b", **settings) as buffer:
        for start in range(0, 600, 100):
            buffer.add({"x": np.repeat(np.arange(start, start + 100), 512).reshape(100, 512)})
        whole = told = 0
        for number in range(400):
            try:
                batch = buffer.sample()
            except OSError as error:
                assert error.errno == errno.EIO  # noqa: PT017
                told += 1
                continue
            whole += 1
            assert 3 not in batch.numbers
            assert (batch["x"] == batch.numbers[:, None]).all()
            if number % 50 == 0:
                buffer.checkpoint()  # also while a batch that tells waits
        # Eight of 600 are drawn each time.
        assert 0 < told < 30
        assert whole == 400 - told


def catalog_bytes(place: Path) -> list[tuple[Path, int]]:
    """Return bytes of the catalog to flip: every 61st that is not zero, and those of the first checksums of pages."""
    found = []
    for file in (place / "catalog" / "data.mdb", place / "catalog.sum"):
        data = file.read_bytes()
        found += [(file, at) for at in np.flatnonzero(np.frombuffer(data, np.uint8))[::61].tolist()]
    data = (place / "catalog" / "data.mdb").read_bytes()
    at = data.rindex(b"pages/samples-0.") + len(b"pages/samples-0.00000000/00000000")
    return [*found, *((place / "catalog" / "data.mdb", at + 4 * page + 1) for page in (0, 7, 59))]


@pytest.mark.filterwarnings("ignore:.*as far as its catalog is whole:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*were left out:RuntimeWarning")
def test_a_flipped_byte_of_the_catalog_costs_little(tmp_path: Path) -> None:
    place = tmp_path / "b"
    filled(place)
    served = []
    for file, at in catalog_bytes(place):
        data = bytearray(file.read_bytes())
        data[at] ^= 4
        file.write_bytes(data)
        try:
            with StoredSamples(place) as stored:
                blocks = [*stored.blocks(7, whole=True)]
            assert all((block["x"] == (block.ids - 100)[:, None]).all() for block in blocks)
            served.append(sum(map(len, blocks)))
        except (CorruptionError, FormatError):
            served.append(-1)
        data[at] ^= 4
        file.write_bytes(data)
    assert served[-3:] == [59, 59, 59]
    assert np.mean(np.array(served) >= 59) > 0.5

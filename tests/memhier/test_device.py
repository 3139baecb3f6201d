"""The probe: its reads, the files it leaves, and its profile through JSON."""

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memhier.errors import FormatError
from memhier.io import device
from memhier.io.device import DepthProfile, DeviceProfile, probe
from memhier.io.mounts import IN_MEMORY, mount_of
from memhier.io.random_file import random_file
from memhier.io.reader import Reader

SMALL: dict[str, Any] = {"size": "8MiB", "seconds": 0.05, "depths": (1, 3, 64)}


class Recorder(Reader):
    """A reader that notes its depth, and the reads it is asked for."""

    calls: ClassVar[list[tuple[np.ndarray, int]]] = []
    depths: ClassVar[list[int]] = []

    def __init__(self, depth: int) -> None:
        super().__init__(depth=depth)
        self.depth = depth

    def read(self, file: Any, offsets: Any, length: int, out: Any = None, latency: Any = None) -> Any:
        self.calls.append((np.array(offsets), length))
        self.depths.append(self.depth)
        result = super().read(file, offsets, length, out, latency)
        stats = self.stats()
        if length == 4096:
            assert stats["reads"] == stats["pages"] == stats["requests"], "neighbours were merged"
        return result


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setattr(device, "Reader", Recorder)
    Recorder.calls.clear()
    Recorder.depths.clear()
    return Recorder


def test_a_folder_is_probed_and_left_as_it_was(tmp_path: Path) -> None:
    profile = probe(tmp_path, **SMALL)
    assert list(tmp_path.iterdir()) == []
    assert [row.depth for row in profile.depths] == [1, 3, 64]
    for row in profile.depths:
        assert row.reads >= 5
        assert row.mb_per_s == pytest.approx(row.iops * 4096 / 1e6)
        assert 0 < row.latency_p50_us <= row.latency_p99_us
    assert profile.sequential_mb_per_s > 0
    assert (profile.path, profile.span_bytes, profile.page_bytes) == (str(tmp_path), 8 << 20, 4096)
    with Reader() as reader:
        assert profile.engine == reader.engine


def test_every_read_goes_to_another_page_and_none_merge(tmp_path: Path, recorder: type[Recorder]) -> None:
    probe(tmp_path, **{**SMALL, "depths": (64,)})  # one depth, so that all reads are of one walk
    random = [offsets for offsets, length in recorder.calls if length == 4096]
    assert random
    for offsets in random:
        assert len(np.unique(offsets)) == len(offsets)
        assert (offsets % 8192 == 0).all()
        assert 0 <= offsets.min() <= offsets.max() < 8 << 20
    several = np.concatenate(random)[:1024]  # at most as many as there are places: none came twice
    assert len(several) > 64
    assert len(np.unique(several)) == len(several)
    assert not (np.diff(several) == 8192).all()


def test_the_depths_take_turns(tmp_path: Path, recorder: type[Recorder]) -> None:
    probe(tmp_path, **SMALL)
    turns = [depth for depth, _ in itertools.groupby(recorder.depths)]
    assert turns == [1, 3, 64, 128] * 6  # the last reads in sequence; the first turns warm up


def test_the_seed_decides_the_order_and_the_bytes(tmp_path: Path, recorder: type[Recorder]) -> None:
    orders = []
    for seed in (7, 7, 8):
        recorder.calls.clear()
        probe(tmp_path, **{**SMALL, "depths": (1,)}, seed=seed)
        orders.append(recorder.calls[0][0].tolist())
    assert orders[0] == orders[1] != orders[2]
    files = []
    for seed in (7, 7, 8):
        with random_file(tmp_path, 8 << 20, seed) as file:
            files.append(file.read_bytes())
    assert files[0] == files[1] != files[2]


def test_the_file_has_no_holes_and_cannot_be_compressed(tmp_path: Path) -> None:
    zlib = pytest.importorskip("zlib")
    with random_file(tmp_path, 8 << 20, 0) as file:
        status = file.stat()
        assert status.st_size == 8 << 20 <= status.st_blocks * 512
        data = file.read_bytes()
        assert len(zlib.compress(data, 1)) >= len(data)
        pages = {data[start : start + 4096] for start in range(0, len(data), 4096)}
        assert len(pages) == 2048
    assert not file.exists()


def test_an_existing_file_is_only_read(tmp_path: Path, recorder: type[Recorder]) -> None:
    file = tmp_path / "rows"
    content = np.random.default_rng(1).bytes((9 << 20) + 97)
    file.write_bytes(content)
    file.chmod(0o444)
    before = file.stat()
    profile = probe(file, seconds=0.05, depths=(2,))
    assert file.read_bytes() == content
    assert (file.stat().st_mtime_ns, os.listdir(tmp_path)) == (before.st_mtime_ns, ["rows"])
    assert (profile.path, profile.span_bytes) == (str(file), 9 << 20)
    recorder.calls.clear()
    assert probe(file, size="8MiB", seconds=0.05, depths=(2,)).span_bytes == 8 << 20
    assert max(int(offsets.max()) + length for offsets, length in recorder.calls) <= 8 << 20


def test_a_file_with_holes_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "sparse"
    with file.open("wb") as handle:
        handle.truncate(8 << 20)
    assert any("holes" in note for note in probe(file, **SMALL).notes)
    with file.open("wb") as handle:
        handle.write(np.random.default_rng(1).bytes(8 << 20))
        handle.flush()
        os.fsync(handle.fileno())  # blocks are counted once they have a place
    assert not any("holes" in note for note in probe(file, **SMALL).notes)


def test_buffered_reads_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "Reader", lambda depth: Reader(depth=depth, direct=False))
    profile = probe(tmp_path, **SMALL)
    assert not profile.direct
    if profile.file_system not in IN_MEMORY:
        assert any("buffered" in note for note in profile.notes)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_memory_is_not_mistaken_for_a_device(tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.disk_usage("/dev/shm").free < 16 << 20:
        pytest.skip("/dev/shm has less than 16 MiB free")
    profile = probe("/dev/shm", **SMALL)
    assert profile.file_system == "tmpfs"
    assert any("memory" in note for note in profile.notes)


class Interrupt(BaseException):
    """Stands for Ctrl-C, which is no Exception either."""


def test_an_interrupt_as_the_file_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.open

    def interrupted(*arguments: Any) -> int:
        os.close(make(*arguments))
        assert len(list(tmp_path.iterdir())) == 1
        raise Interrupt

    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(Interrupt):
        probe(tmp_path, **SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("calls", [0, 6], ids=["warming up", "measuring"])
def test_the_file_goes_away_when_measuring_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: type[Recorder], calls: int
) -> None:
    read = recorder.read

    def interrupted(reader: Recorder, *arguments: Any, **more: Any) -> Any:
        if len(recorder.calls) < calls:
            return read(reader, *arguments, **more)
        assert len(list(tmp_path.iterdir())) == 1
        raise Interrupt

    monkeypatch.setattr(recorder, "read", interrupted)
    with pytest.raises(Interrupt):
        probe(tmp_path, **SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_fault_in_writing_names_the_file_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OSError, match="memhier-probe") as caught:
        probe(tmp_path, **SMALL)
    assert caught.value.errno == errno.EIO
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with random_file(tmp_path, 8 << 20, 5) as file:
        whole = file.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[:99_991]))
    with random_file(tmp_path, 8 << 20, 5) as file:
        assert file.read_bytes() == whole


def test_a_full_device_is_refused_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a file was made"))
    with pytest.raises(OSError, match="smaller size") as caught:
        probe(tmp_path, size="900TiB")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"size": "1MiB"}, ValueError, "size.*at least 8.0 MiB"),
        ({"size": "16 potatoes"}, ValueError, "size='16 potatoes'"),
        ({"size": "8MiB", "depths": (1025,)}, ValueError, "depths=.*1 to 1024"),
        ({"depths": ()}, ValueError, "depths="),
        ({"depths": (0, 1)}, ValueError, "depths="),
        ({"depths": (4, 4)}, ValueError, "depths=.*different"),
        ({"depths": (1.0,)}, TypeError, "depths="),
        ({"depths": (True,)}, TypeError, "depths="),
        ({"seconds": 0}, ValueError, "seconds=0"),
        ({"seconds": float("nan")}, ValueError, "seconds=nan"),
        ({"seconds": float("inf")}, ValueError, "seconds=inf"),
        ({"seconds": "8"}, TypeError, "seconds='8'"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"seed": 0.5}, TypeError, "seed=0.5"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        probe(tmp_path, **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: None, FileNotFoundError),
        (lambda path: path.touch(), ValueError),
        (os.mkfifo, ValueError),
    ],
)  # fmt: skip
def test_paths_that_cannot_be_probed(tmp_path: Path, make: Callable[[Path], None], error: type[Exception]) -> None:
    make(tmp_path / "there")
    with pytest.raises(error, match="there"):
        probe(tmp_path / "there")


counts = st.integers(0, 2**40)
rates = st.floats(0, 1e12)
rows = st.builds(DepthProfile, counts, rates, rates, rates, rates, counts)
profiles = st.builds(
    DeviceProfile, st.text(), st.text(), st.text(), st.text(), st.text(), st.text(), st.booleans(), counts, counts,
    counts, rates, st.lists(rows, max_size=3).map(tuple), st.lists(st.text(), max_size=3).map(tuple),
)  # fmt: skip


@given(profiles)
def test_json_returns_the_same_profile(profile: DeviceProfile) -> None:
    assert DeviceProfile.from_json(profile.to_json()) == profile


EXAMPLE = DeviceProfile(
    path="/ssd", file_system="ext4", device="/dev/sda", kernel="Linux 6", date="2026-01-01T00:00:00+00:00",
    engine="uring", direct=True, page_bytes=4096, span_bytes=1 << 30, seed=0, sequential_mb_per_s=1.5,
    depths=(DepthProfile(1, 10.0, 0.04, 90.0, 120.0, 5),), notes=(),
)  # fmt: skip


def _edited(change: Callable[[dict[str, Any]], Any]) -> str:
    record = json.loads(EXAMPLE.to_json())
    change(record)
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[1]", "format"),
        ("{}", "format"),
        (_edited(lambda record: record.update(format="other/1")), "format"),
        (_edited(lambda record: record.pop("engine")), "engine"),
        (_edited(lambda record: record.update(extra=1)), "extra"),
        (_edited(lambda record: record.update(direct=1)), "direct"),
        (_edited(lambda record: record.update(seed=True)), "seed"),
        (_edited(lambda record: record.update(depths={})), "depths"),
        (_edited(lambda record: record["depths"].append(3)), "DepthProfile"),
        (_edited(lambda record: record["depths"][0].update(iops="many")), "iops"),
        (_edited(lambda record: record["depths"][0].pop("reads")), "reads"),
        (_edited(lambda record: record.update(notes=[1])), "notes"),
    ],
)  # fmt: skip
def test_json_that_is_no_profile_is_refused(text: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        DeviceProfile.from_json(text)


def test_mounts_are_matched_by_the_longest_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "a b" / "c"
    deep.mkdir(parents=True)
    spaced = str(tmp_path / "a b").replace(" ", "\\040")
    table = "\n".join([
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw",
        f"2 1 8:2 / {spaced} rw shared:1 - xfs /dev/old rw",
        f"3 1 8:3 / {spaced} rw shared:1 - btrfs /dev/disk\\040two rw",
        f"4 1 8:4 / {spaced}x rw - tmpfs none rw",
    ])  # fmt: skip
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: table if path.name == "mountinfo" else read(path))
    assert mount_of(deep) == ("btrfs", "/dev/disk two")
    assert mount_of(tmp_path) == ("ext4", "/dev/sda1")

    def missing(path: Path) -> str:
        raise FileNotFoundError(errno.ENOENT, "no /proc", str(path))

    monkeypatch.setattr(Path, "read_text", missing)
    assert mount_of(tmp_path) == ("unknown", "unknown")


def test_offsets_kept_in_memory_do_not_grow_with_the_file(
    tmp_path: Path, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_OFFSETS_MAX", 97)
    probe(tmp_path, **SMALL)
    reads = [offsets for offsets, length in recorder.calls if length == 4096]
    walk = np.concatenate(reads)
    assert len(np.unique(walk)) == 97
    assert walk.max() > 4 << 20
    assert len(walk) > 97
    assert (walk[97:] == walk[:-97]).all()  # it wraps around once all others came
    assert all(len(np.unique(offsets)) == len(offsets) for offsets in reads)  # and never within a call


def test_a_queue_as_deep_as_the_file_allows(tmp_path: Path) -> None:
    assert probe(tmp_path, size="8MiB", seconds=0.01, depths=(1024, 1)).depths[-1].depth == 1024

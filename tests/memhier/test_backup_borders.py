"""The borders of push, pull and reading in place: what is refused, in which words, and with nothing changed."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memhier.remote.place
from memhier import FormatError, Store, Tiered, backups, check_backup, prune_backups
from memhier.benchmarks.simulated_store import Bucket, SimulatedStore, simulated

URL = "simulated://bucket/store"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memhier.remote.place, "FIRST_WAIT_S", 0.0)


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with simulated("bucket") as bucket:
        yield bucket


@pytest.fixture
def store(tmp_path: Path, bucket: Bucket) -> Iterator[Store]:
    with Store.create(tmp_path / "store", "test") as store:
        with store.begin() as tx:
            tx.segment("rows").append(np.arange(3000))
            tx.commit()
        yield store


def files_below(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*")}


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("below", ["", "/", "/backup", "/segments/../backup"])
def test_a_store_is_not_pushed_into_itself(tmp_path: Path, store: Store, scheme: str, below: str) -> None:
    before = files_below(tmp_path)
    with pytest.raises(ValueError, match="in the store itself"):
        store.push(f"{scheme}{store.path}{below}")
    os.symlink(store.path, tmp_path / "link")
    with pytest.raises(ValueError, match="in the store itself"):
        store.push(f"{scheme}{tmp_path}/link{below}")
    os.remove(tmp_path / "link")
    assert files_below(tmp_path) == before
    assert store.push(f"{scheme}{store.path}-backup").generation == 1  # a sibling with a name that begins alike


def test_nor_into_another_store(tmp_path: Path, store: Store) -> None:
    Store.create(tmp_path / "other", "test").close()
    before = files_below(tmp_path / "other")
    with pytest.raises(FileExistsError, match="a store is there"):
        store.push(f"file://{tmp_path}/other")
    assert files_below(tmp_path / "other") == before


@pytest.mark.parametrize("url", ["", "file://", "memory://", "simulated://", "file:///", "/"])
def test_a_url_names_a_folder(store: Store, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    before = files_below(tmp_path)
    for call in (store.push, backups, check_backup, lambda url: Store.pull(url, tmp_path / "copy")):
        with pytest.raises(ValueError, match="names no folder"):
            call(url)
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("keep", [0, -1, 1.5, "2"])
def test_keep_is_checked_before_anything_moves(store: Store, bucket: Bucket, keep: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="keep="):
        store.push(URL, keep=keep)
    assert bucket.requests == 0


@pytest.mark.parametrize("verify", [0, 1, "read", None])
def test_verify_is_checked_before_anything_moves(store: Store, bucket: Bucket, verify: Any) -> None:
    with pytest.raises(TypeError, match=r"verify=.*expected True or False"):
        store.push(URL, verify=verify)
    assert bucket.requests == 0


@pytest.mark.parametrize("url", ["://x", ":/x", "s3:/bucket/x", Path("s3://bucket/x"), "1x://y", " s3://x", "s3 ://x"])
def test_a_malformed_url_is_refused(store: Store, url: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    before = files_below(tmp_path)
    for call in (store.push, backups, check_backup, lambda url: Store.pull(url, tmp_path / "copy")):
        with pytest.raises(ValueError, match=r"url=.*: expected a URL such as 's3://bucket/folder'"):
            call(url)
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("path", ["memory://folder/store", Path("s3://bucket/store")])
def test_a_store_is_made_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any, store: Store) -> None:
    store.push(URL)
    monkeypatch.chdir(tmp_path)
    before = files_below(tmp_path)
    makers: list[Callable[[], object]] = [
        lambda: Store.create(path, "test"),
        lambda: Store.pull(URL, path),
        lambda: Tiered(path, "rows", np.int64, 2, rows=10, dram="8MiB"),
        lambda: Store.open(URL, "test", cache="memory://cache"),
        lambda: Store.open(Path("memory://folder/store"), "test"),
    ]
    for make in makers:
        with pytest.raises(ValueError, match="expected a folder on this machine"):
            make()
    assert files_below(tmp_path) == before


def test_other_words(tmp_path: Path, store: Store, bucket: Bucket) -> None:
    store.push(f"file://{tmp_path}/far")
    with pytest.raises(FormatError, match=rf"a backup, not a store; open it by its URL, 'file://{tmp_path}/far'"):
        Store.open(tmp_path / "far", "test")
    with pytest.raises(ValueError, match="a backup is only read in place; pull it"):
        Store.open(f"file://{tmp_path}/far", "test", writable=True)
    with Store.create(tmp_path / "empty", "test") as empty:
        for copy in (lambda: empty.push(URL), lambda: empty.copy(tmp_path / "copy")):
            with pytest.raises(FormatError, match="commit, or take a checkpoint"):
                copy()
    with pytest.raises(FileNotFoundError, match="no memhier backup here"):
        check_backup(URL)
    assert (backups(URL), prune_backups(URL, 1)) == ([], 0)
    assert bucket.objects == {}
    with pytest.raises(TypeError, match="generation="):
        Store.pull(f"file://{tmp_path}/far", tmp_path / "copy", generation="1")  # type: ignore[arg-type]
    assert not (tmp_path / "copy").exists()


class ProviderError(Exception):
    """As those of the file systems of object stores, which are no OSError."""


def test_errors_of_a_file_systems_own(tmp_path: Path, store: Store, bucket: Bucket, monkeypatch: Any) -> None:
    """botocore, gcsfs and azure raise errors of their own; gcsfs does so for a name that is taken, too."""
    plain, failing = SimulatedStore.pipe_file, [4]

    def pipe_file(self: Any, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        failing[0] -= 1
        if failing[0] >= 0:
            raise ProviderError("slow down")
        try:
            plain(self, path, value, mode=mode, **kwargs)
        except FileExistsError as error:
            raise ProviderError("412: precondition failed") from error

    monkeypatch.setattr(SimulatedStore, "pipe_file", pipe_file)
    store.push(URL)
    with store.begin() as tx:
        tx.put("key", b"value")
        tx.commit()
    begun, nested = bucket.requests, []

    def meanwhile(number: int) -> None:
        if number == begun + 4 and not nested:  # another push of the same store takes the number
            nested.append(True)
            bucket.lock.release()
            try:
                store.push(URL)
            finally:
                bucket.lock.acquire()

    bucket.fault = meanwhile
    assert store.push(URL).generation == 2
    assert nested
    bucket.fault = lambda number: None
    assert [each.generation for each in backups(URL)] == [1, 2]
    assert check_backup(URL) == []
    failing[0] = 10**6
    with store.begin() as tx:
        tx.put("key", b"other")
        tx.commit()
    with pytest.raises(OSError, match=r"failed 6 times, .*slow down.*simulated://bucket/store/objects"):
        store.push(URL)


def test_a_place_that_refuses(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError("Access Denied")  # s3fs gives no number and no path

    monkeypatch.setattr(SimulatedStore, "pipe_file", refuse)
    with pytest.raises(PermissionError, match=r"Access Denied: 'simulated://bucket/store/objects/") as caught:
        store.push(URL)
    assert caught.value.errno


@pytest.mark.parametrize("refusal", [NotImplementedError(), TypeError("unexpected keyword argument 'mode'")])
def test_a_file_system_that_lacks_a_call(tmp_path: Path, store: Store, monkeypatch: Any, refusal: Exception) -> None:
    """Those of http, zip and data in fsspec do; no call is made again."""
    calls = []

    def refuse(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        raise refusal

    monkeypatch.setattr(SimulatedStore, "ls", refuse)
    for call in (store.push, backups, check_backup, lambda url: Store.pull(url, tmp_path / "copy")):
        calls.clear()
        with pytest.raises(OSError, match=r"does not serve as a backup's: .*simulated://bucket/store/") as caught:
            call(URL)
        assert (caught.value.errno, len(calls)) == (errno.ENOTSUP, 1)


def test_errors_before_the_first_request_name_the_url(tmp_path: Path, store: Store, monkeypatch: Any) -> None:
    for url in ("nope://bucket/store", "reference://store"):
        for call in (store.push, backups, check_backup):
            with pytest.raises(ValueError, match=url):
                call(url)
    with pytest.raises(OSError, match=r"file|directory") as caught:
        backups(f"zip://store::file://{tmp_path}/none.zip")
    assert caught.value.filename == f"zip://store::file://{tmp_path}/none.zip"

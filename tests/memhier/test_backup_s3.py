"""Backups by s3fs over HTTP, in a server on this machine that speaks S3."""

import logging
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

import memhier.remote.place
from memhier import CorruptionError, Store, backups, check_backup, prune_backups

s3fs = pytest.importorskip("s3fs", reason="needs s3fs; pip install s3fs 'moto[server]'")
moto_server = pytest.importorskip("moto.server", reason="needs moto; pip install s3fs 'moto[server]'")

URL = "s3://bucket/some folder/ünï/store"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3fs.S3FileSystem]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setattr(memhier.remote.place, "FIRST_WAIT_S", 0.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()
    files = s3fs.S3FileSystem()
    files.mkdir("bucket")
    yield files
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def commit(path: Path, seed: int, size: int = 20_000) -> np.ndarray:
    made = path.exists()
    with Store.open(path, "test", writable=True) if made else Store.create(path, "test") as store, store.begin() as tx:
        contents = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
        tx.segment(f"part-{seed}").append(contents)
        tx.put("seed", str(seed).encode())
        tx.commit()
    return contents


def push(path: Path, url: str = URL) -> int:
    with Store.open(path, "test") as store:
        return store.push(url).moved_bytes


def test_push_pull_search_and_prune(tmp_path: Path, server: s3fs.S3FileSystem) -> None:
    parts = {seed: commit(tmp_path / "store", seed, size) for seed, size in ((1, 9 << 20), (2, 0))}
    assert push(tmp_path / "store") > 9 << 20
    parts[3] = commit(tmp_path / "store", 3)
    assert push(tmp_path / "store") < 30_000
    assert push(tmp_path / "store") == 0
    assert [each.generation for each in backups(URL)] == [2, 3]
    assert check_backup(URL) == []
    with Store.open(URL, "test", cache=tmp_path / "cache", cache_bytes="1MiB") as far:
        assert all(np.array_equal(far.read_segment(f"part-{seed}"), part) for seed, part in parts.items())
    Store.pull(URL, tmp_path / "copy", generation=2)
    Store.pull(URL, tmp_path / "copy")
    with Store.open(tmp_path / "copy", "test") as copy:
        assert copy.check() == []
        assert all(np.array_equal(copy.read_segment(f"part-{seed}"), part) for seed, part in parts.items())
    assert prune_backups(URL, 1) > 0
    assert [each.generation for each in backups(URL)] == [3]
    assert check_backup(URL) == []
    victim = max(server.ls(f"{URL}/objects", detail=True), key=lambda each: each["size"])["name"]
    server.pipe_file(victim, b"damaged")
    assert len(check_backup(URL)) == 1
    with pytest.raises(CorruptionError, match="object's name"):
        Store.pull(URL, tmp_path / "other")


def test_more_objects_than_one_page_of_a_listing(
    tmp_path: Path, server: s3fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")
    for number in range(35):
        server.pipe_file(f"{URL}/objects/{number:064x}", b"left by a push that was killed")
    expected = commit(tmp_path / "store", 1)
    push(tmp_path / "store")
    assert check_backup(URL) == []
    assert prune_backups(URL, 1) == 35
    Store.pull(URL, tmp_path / "copy")
    with Store.open(tmp_path / "copy", "test") as copy:
        assert np.array_equal(copy.read_segment("part-1"), expected)


def test_pushes_at_a_time(tmp_path: Path, server: s3fs.S3FileSystem) -> None:
    expected = commit(tmp_path / "store", 1, 3 << 20)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=push, args=(tmp_path / "store",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert [each.generation for each in backups(URL)] == [1]
    assert check_backup(URL) == []
    Store.pull(URL, tmp_path / "copy")
    with Store.open(tmp_path / "copy", "test") as copy:
        assert np.array_equal(copy.read_segment("part-1"), expected)


def test_errors_are_of_the_operating_systems_kind(
    tmp_path: Path, server: s3fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path / "store", 1)
    with pytest.raises(FileNotFoundError, match=r"bucket does not exist: 's3://no-bucket/store/objects/"):
        push(tmp_path / "store", "s3://no-bucket/store")
    for url in ("s3://no-bucket/store", "s3://bucket/nothing"):
        with pytest.raises(FileNotFoundError, match="no memhier backup here"):
            Store.pull(url, tmp_path / "copy")
    # Nothing listens there.
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with pytest.raises(OSError, match=r"failed 6 times, the last time with: EndpointConnectionError.*'s3://bucket"):
        push(tmp_path / "store")
    assert not (tmp_path / "copy").exists()

"""The guard of a catalog: a reader finds each published commit, and a commit reads only the pages that it wrote."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memhier.errors import CorruptionError
from memhier.files import RealFiles, read_file
from memhier.io.kernels import crc32c_pages
from memhier.store import catalog_tree
from memhier.store.catalog import Catalog, Guard, Published
from memhier.store.catalog_tree import CatalogTree
from memhier.store.store import Store

KIND = "test"
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
SIZES = st.sampled_from([0, 1, 97, 2000, 5000, 40_000]) | st.none()
CHANGES = st.dictionaries(st.integers(0, 300), SIZES, max_size=60)


def keyed(changes: dict[int, int | None], seed: int) -> dict[bytes, bytes | None]:
    rng = np.random.default_rng(seed)
    return {
        b"key%0100d" % number: None if size is None else rng.bytes(size) for number, size in sorted(changes.items())
    }


def read_guard(root: Path) -> Guard:
    return Guard.decode(read_file(RealFiles(), str(root / "catalog.sum")), "catalog.sum")


def full(root: Path) -> Guard:
    """Return the guard as it is taken by reading the whole file."""
    guard = read_guard(root)
    with RealFiles().open(str(root / "catalog" / "data.mdb"), "r") as file:
        tree = CatalogTree(file, guard.page_size)
        return Published.of(tree, tree.read_meta(guard.transaction), None).guard


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(CHANGES, st.sampled_from(["publish", "crash", "twice"])), max_size=12))
def test_the_published_catalog_is_the_committed_one(commits: list[tuple[dict[int, int | None], str]]) -> None:
    """Where the snapshot reaches, the checksums are those of a guard taken from the whole file."""
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        root = Path(folder)
        catalog, model = Catalog(RealFiles(), folder), keyed(dict.fromkeys(range(100), 2000), 0)
        catalog.create({key: value for key, value in model.items() if value is not None})
        transaction = 1
        for number, (changes, then) in enumerate(commits, 1):
            transaction += 1
            catalog.commit(keyed(changes, number))
            model |= keyed(changes, number)
            if then == "twice":
                transaction += 1
                catalog.commit({b"more": b"%d" % number})
                model[b"more"] = b"%d" % number
            if then == "crash":
                catalog = Catalog(RealFiles(), folder)  # between LMDB's commit and its publication
                catalog.recover()
            else:
                catalog.publish()
            expected = {key: value for key, value in model.items() if value is not None}
            assert Catalog(RealFiles(), folder).read().entries == expected
            guard, whole = read_guard(root), full(root)
            assert (guard.transaction, len(guard.checksums)) == (transaction, len(whole.checksums))
            with RealFiles().open(str(root / "catalog" / "data.mdb"), "r") as file:
                tree = CatalogTree(file, guard.page_size)
                used = ~tree.free_pages(tree.read_meta(guard.transaction))[: len(guard.checksums)]
            assert np.array_equal(guard.checksums[used], whole.checksums[used])


def test_a_commit_reads_the_pages_that_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small change of a catalog of 10 MiB, also where most of that was freed, and in a writer that just opened it."""
    read = 0

    def count(block: memoryview) -> NDArray[np.uint32]:
        nonlocal read
        read += len(block)
        return crc32c_pages(block)

    def change(store: Store, number: int) -> int:
        nonlocal read
        read = 0
        with store.begin() as tx:
            tx.put("number", b"%d" % number)
            tx.commit()
        return read // 4096

    monkeypatch.setattr(catalog_tree, "crc32c_pages", count)
    root = tmp_path / "store"
    with Store.create(root, KIND) as store:
        with store.begin() as tx:
            for number in range(320):
                tx.put(f"{number}", bytes(2**15))
            tx.commit()
        assert max(change(store, number) for number in range(5)) < 50
        assert store.memory_bytes < 320 * (2**15 + 4) + 5 * 3500
        with store.begin() as tx:
            for number in range(300):
                tx.delete(f"{number}")
            tx.commit()
        assert max(change(store, number) for number in range(5)) < 50
    with Store.open(root, KIND, writable=True) as store:
        assert max(change(store, number) for number in range(5)) < 50
    with Store.open(root, KIND, verify="open") as store:
        assert (store.get("number"), len(store.keys())) == (b"4", 21)


def test_damage_gets_no_checksum(tmp_path: Path) -> None:
    """Damage to the catalog while a writer has it open is still found after the writer's next commit."""
    root = tmp_path / "store"
    with Store.create(root, KIND) as store:
        with store.begin() as tx:
            tx.put("large", b"unmistakable" * 500)
            tx.commit()
        data = root / "catalog" / "data.mdb"
        with open(data, "r+b") as file:
            file.seek(data.read_bytes().index(b"unmistakable") + 999)
            file.write(b"!")
        with store.begin() as tx:
            tx.put("other", b"1")
            tx.commit()
        assert [finding.harmless for finding in store.check()] == [False]
    with pytest.raises(CorruptionError, match="does not match its checksum"):
        Store.open(root, KIND)

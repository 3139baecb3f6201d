"""Rewrites each decoded thing of a valid store in turn, with right checksums, then opens and uses the store.

``python hostile_stores.py KIND FOLDER EVERY``: of so many changes makes one, and those that were believed once, and
prints a line for each after which there was anything but success, a CorruptionError or a FormatError that names the
path; then ``done`` with the number of changes. Address space and the seconds of each change are limited. The last line
on standard error tells which change it was that ended the process.
"""

import contextlib
import json
import re
import resource
import shutil
import signal
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from memhier.errors import CorruptionError, FormatError
from memhier.files import RealFiles
from memhier.io.kernels import crc32c
from memhier.store.catalog import Catalog
from memhier.store.store import Store

SECONDS = 20
MORE_BYTES = 3 * 2**30
VALUES: list[Any] = [
    None, True, -5, 0, 1, 2**31, 2**44, 2**63, -(2**63), 10**400, 0.5, -1e308, float("nan"), float("inf"), "", "x",
    "../../x", "/etc/passwd", "a\0b", [], [None], [[]], {}, {"x": 1}, [-5], ["../../x"],
]  # fmt: skip


def changed(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a JSON value with one place of it changed; of long lists the first and the last entry."""
    for other in VALUES:
        if type(other) is not type(value) or other != value:
            yield f" = {str(other)[:20]!r}", other
    if isinstance(value, dict):
        for key in list(value):
            less = {name: entry for name, entry in value.items() if name != key}
            yield f"[{key!r}] removed", less
            for place, entry in changed(value[key]):
                yield f"[{key!r}]{place}", {**value, key: entry}
        yield "['unknown'] added", {**value, "unknown": 1}
    elif isinstance(value, list):
        for index in dict.fromkeys([0, len(value) - 1]) if value else []:
            yield f"[{index}] removed", value[:index] + value[index + 1 :]
            yield f"[{index}] twice", [*value, value[index]]
            for place, entry in changed(value[index]):
                yield f"[{index}]{place}", [*value[:index], entry, *value[index + 1 :]]
    elif type(value) is int:
        yield " + 1", value + 1


def changed_bytes(raw: bytes, wide: int = 8) -> Iterator[tuple[str, bytes]]:
    """Yield packed numbers with one of them changed, or another length."""
    yield " emptied", b""
    yield " cut", raw[:-1]
    yield " longer", raw + bytes(wide)
    yield " of 0xff", b"\xff" * len(raw)
    yield " of zeros", bytes(len(raw))
    for at in dict.fromkeys([*range(0, min(len(raw), 12 * wide), wide), max(0, len(raw) - wide)]):
        now = int.from_bytes(raw[at : at + wide], "little")
        for number in (0, 1, now + 1, 2**31, 2**44, 2**62, 2**63, 2**64 - 1):
            put = (number % 2 ** (8 * wide)).to_bytes(wide, "little")
            if put != raw[at : at + wide]:
                yield f" at {at}: {number}", raw[:at] + put + raw[at + wide :]


def changes(place: Path, kind: str) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield each change of a store as a name and what it does in a transaction."""
    with Store.open(place, kind) as store:
        values = {key: store.get(key) or b"" for key in store.keys()}  # noqa: SIM118
        segments = {name: store.read_segment(name).tobytes() for name in store.segments()}
    for key, raw in values.items():
        try:
            decoded = json.loads(raw)
        except ValueError:
            others = changed_bytes(raw)
        else:
            others = ((what, json.dumps(value).encode()) for what, value in changed(decoded))
            for odd in (b"", b"{", b"\xff\xfe", b"[" * 10_000, raw[:-1]):
                yield f"value {key!r} is {odd[:4]!r}", lambda tx, key=key, odd=odd: tx.put(key, odd)
        yield f"value {key!r} removed", lambda tx, key=key: tx.delete(key)
        for what, other in others:
            yield f"value {key!r}{what}", lambda tx, key=key, other=other: tx.put(key, other)
    for name, raw in segments.items():
        yield f"segment {name!r} removed", lambda tx, name=name: tx.drop(name)
        noise = np.random.default_rng(1).bytes(len(raw))
        for what, other in [*changed_bytes(raw), (" of noise", noise), (" half as long", raw[: len(raw) // 2])]:
            yield (
                f"segment {name!r}{what}",
                lambda tx, name=name, other=other: tx.segment(name).append(other),
            )


def catalog_changes(place: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield each change of the catalog's own entries and of its guard, made past the store."""
    entries = Catalog(RealFiles(), str(place)).read().entries
    outside = place.parent / "outside"
    for index in ("", ".00000001.seg"):
        outside.with_name(f"outside{index}").write_bytes(bytes(4096))

    def put(changes: dict[bytes, bytes | None]) -> Callable[[Path], None]:
        def work(now: Path) -> None:
            catalog = Catalog(RealFiles(), str(now))
            catalog.recover()
            catalog.commit(changes)
            catalog.publish()

        return work

    for key, raw in entries.items():
        if not key.startswith(b"value/"):
            yield f"entry {key!r} removed", put({key: None})
            for what, other in changed_bytes(raw):
                yield f"entry {key!r}{what}", put({key: other})
    for name in (b"../../outside", b"../outside", b"/etc/passwd", b"", b"a\0b", b"a/b", b"..", b"\xff", b"x" * 300):
        record = struct.pack("<QQQ", 1, 4096, 10)
        yield f"a segment {name!r}", put({b"segment/" + name: record, b"pages/%s.00000001/00000000" % name: bytes(4)})
    yield "a value of bad UTF-8", put({b"value/\xff": b""})
    yield "a kind of bad UTF-8", put({b"store": entries[b"store"][:12] + b"\xff"})

    guard = (place / "catalog.sum").read_bytes()[:-4]
    for what, other in changed_bytes(guard):

        def write(now: Path, other: bytes = other) -> None:
            (now / "catalog.sum").write_bytes(other + struct.pack("<I", crc32c(other)))

        yield f"guard{what}", write


# Changes that are made whatever `every` says, as they were believed once, or told in other words.
ONCE_BELIEVED = re.compile(
    r"value 'log/embedding' at 8: 2147483648|'recsys/(tables|extra)' removed|\['momentum'\] = '-5'"
    r"|\['begun_with'\](\['lr'\])? removed|\['betas'\]\[1\] = '1'|segment 'index-0' at 8: 18446744073709551615"
    r"|\['dimension'\] \+ 1|\['reached'\]\['10'\] removed"
)


def run(kind: str, place: Path, use: Callable[[Path], None], work: Path, every: int) -> None:
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    first = zlib.crc32(kind.encode()) % every
    now, count = work / "now", 0

    def in_store(change: Callable[[Any], None]) -> Callable[[Path], None]:
        def work(now: Path) -> None:
            with Store.open(now, kind, writable=True) as store, store.begin() as tx:
                change(tx)
                tx.commit()

        return work

    of_store = [(name, in_store(change)) for name, change in changes(place, kind)]
    of_catalog = [*catalog_changes(place)] if kind == "test" else []
    for number, (name, change) in enumerate([*of_store, *of_catalog]):
        if number % every != first and not ONCE_BELIEVED.search(name):
            continue
        count += 1
        shutil.rmtree(now, ignore_errors=True)
        shutil.copytree(place, now)
        change(now)
        print(f"{name}", file=sys.stderr, flush=True)
        tell(name, now, use)
    print(f"done {count}", flush=True)


# What a store that is whole, but not the one that it was, says to a question that was about that one.
ANSWERS = re.compile(
    r"no attribute|has no attributes|which is not in the index"
    r"|number of vectors in the index|too large: distances|of DRAM in all|of one row in DRAM"
    r"|expected fields of this index"
    r"|beside resume=True, but the training began with"
)


def tell(name: str, now: Path, use: Callable[[Path], None]) -> None:
    signal.alarm(SECONDS)
    try:
        use(now)
    except (CorruptionError, FormatError) as error:
        if str(now) not in str(error):
            print(f"{name}: no path in {type(error).__name__}: {error}", flush=True)
    except BaseException as error:
        if isinstance(error, ValueError | KeyError) and ANSWERS.search(str(error)):
            return
        print(f"{name}: {type(error).__name__}: {str(error)[:200]} @ {where(error)}", flush=True)
    finally:
        signal.alarm(0)


def where(error: BaseException) -> str:
    trace, found = error.__traceback__, []
    while trace is not None:
        found.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " ".join(found[-4:])


# Kinds of store: how to make one, and how to use it.


def make_store(place: Path) -> str:
    from memhier.io.reader import Reader
    from memhier.log.row_log import RowLog
    from memhier.log.samples import Samples
    from memhier.rows.rows import RowsWriter

    with Store.create(place, "test") as store, Reader() as reader:
        with RowLog(store, "log", 24, reader, 1000) as log:
            log.append(np.arange(300), np.zeros((300, 24), np.uint8))
            log.delete([5, 6])
            log.commit()
            log.append(np.arange(7), np.ones((7, 24), np.uint8))
            log.commit()
        with Samples(store, "samples", reader, 100, key_space=100, grows=True) as samples:
            samples.put([3, 4, 5], [b"abc", b"", bytes(70_000)])
            samples.commit()
        with store.begin() as tx:
            writer = RowsWriter(tx, "rows", 40)
            writer.append(np.arange(4000, dtype=np.uint8).reshape(100, 40))
            writer.finish()
            tx.commit()
    return "test"


def use_store(place: Path) -> None:
    from memhier.io.reader import Reader
    from memhier.log.row_log import RowLog
    from memhier.log.samples import Samples
    from memhier.rows.rows import Rows

    for writable in (False, True):
        with Store.open(place, "test", writable=writable, verify="open") as store, Reader() as reader:
            with RowLog(store, "log", 24, reader, 1000) as log:
                log.read(np.arange(300))
                if writable:
                    log.append([999], np.ones((1, 24), np.uint8))
                    log.compact(1)
                    log.commit()
            with Samples(store, "samples", reader, 100, key_space=100, grows=True) as samples:
                samples.get([3, 4, 5])
                if writable:
                    samples.put([9], [b"abc"])
                    samples.compact(1)
                    samples.commit()
            with Rows(store, "rows", reader) as rows:
                rows.read(np.arange(len(rows)))


def make_table(place: Path) -> str:
    from memhier.table.tiered import KIND, Tiered

    with Tiered(place, "table", np.float32, 4, rows=1000, dram="12MiB") as table:
        table.scatter(np.arange(300), np.ones((300, 4), np.float32))
        table.checkpoint()
    return KIND


def use_table(place: Path) -> None:
    from memhier import Tiered

    with Tiered(place, "table", np.float32, 4, rows=1000, dram="12MiB") as table:
        table.gather(np.arange(300))
        table.scatter([3], np.zeros((1, 4), np.float32))
        table.checkpoint()


def make_index(place: Path, **options: Any) -> str:
    from memhier.ann import ZoomIndex

    vectors = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    about = {"price": np.arange(400), "lang": ["en", "de"] * 200, "share": np.arange(400) / 4}
    about["new"] = [True, False] * 200
    with ZoomIndex.build(place, vectors, dram="24MiB", attributes=about, **options) as index:
        ids = None if options.get("ids") is None else [f"new{row}" for row in range(20)]
        index.add(vectors[:20] + 1, ids=ids, attributes={name: values[:20] for name, values in about.items()})
        index.remove([next(iter(options["ids"]))] if ids else [3])
        index.commit(compact=False)
    return "zoom-index"


def use_index(place: Path, texts: bool = False) -> None:
    from memhier.ann import ZoomIndex

    queries = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    with ZoomIndex.open(place) as index:
        index.search(queries, k=5)
        index.search(queries, k=300, recall=0.9)
        index.search(queries, k=5, where="price < 200 and lang == 'en' and new and share < 1e9")
        index.check()
    with ZoomIndex.open(place, writable=True) as index:
        index.add(queries, ids=["a", "b", "c"] if texts else None, attributes={"price": [1, 2, 3]})
        index.commit()
        index.search(queries, k=5)


MOMENT = datetime(2024, 1, 31)


def fields(count: int) -> dict[str, Any]:
    """Return lists of every type, and documents, of so many rows."""
    lists = {"tags": ["new", "red", "日本"], "sizes": [1, -(2**63), 7], "shares": [0.5, 1.0, -2.0]}
    lists |= {"marks": [True, False, True], "days": [MOMENT, MOMENT, MOMENT]}
    about = {name: [None, *(items[row % 4 :] for row in range(count - 1))] for name, items in lists.items()}
    return {"attributes": about, "documents": {"text": ["long" * (row % 90) for row in range(count)]}}


def make_index_of_fields(place: Path) -> str:
    from memhier.ann import ZoomIndex

    vectors = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    with ZoomIndex.build(place, vectors, dram="24MiB", **fields(400)) as index:
        index.add(vectors[:20] + 1, **fields(20))
        index.remove([3])
        index.commit(compact=False)
        index.add(vectors[:20] + 2, **fields(20))
        index.remove([4])
        index.prepare(3)
    return "zoom-index"


def use_index_of_fields(place: Path) -> None:
    from memhier.ann import ZoomIndex

    query = np.random.default_rng(1).standard_normal(8).astype(np.float32)

    def look(index: ZoomIndex) -> None:
        index.search(query, k=5, where="tags contains 'red' or sizes contains all (1, 7)", fields=True).rows()
        index.search(query, k=5, where="shares contains 0.5 and marks contains false and days is not null")
        index.search(query, k=420, recall=1.0, fields=True).rows()
        index.explain(query, k=5)
        for _ in index.search_iter(query, 100, fields=["tags", "text"]):
            pass
        index.check()

    with ZoomIndex.open(place) as index:
        look(index)
        _ = index.mark
    for made in (False, True):
        settled = place.with_name("settled")
        shutil.rmtree(settled, ignore_errors=True)
        shutil.copytree(place, settled)
        try:
            with ZoomIndex.open(settled, writable=True, settle=lambda _, made=made: made) as index:
                index.update([7], query[None], attributes={"tags": [["red"]]})
                look(index)
                index.commit(compact=False)
                look(index)
        except (CorruptionError, FormatError) as error:
            raise type(error)(str(error).replace(str(settled), str(place))) from error


def make_replay(place: Path, admit: str = "reservoir", storage: int | str = 60) -> str:
    from memhier.recsys.replay import Balanced, CarouselBuffer, Field, ProductCodes, Weighted

    admits: dict[str, Any] = {"quotas": Balanced("part", quotas={0: 9, 1: 20}), "weights": Weighted("part")}
    schema = {"x": ("float32", (3,)), "logits": Field("float32", (2,), mutable=True)}
    schema["text"] = Field("uint8", (None,), longest=20, mean=5)
    codes = ProductCodes.train(np.random.default_rng(1).random((256, 4), np.float32), 2, seed=0)
    schema |= {"latent": Field("float32", (4,), codec=codes), "state": Field("float32", (2,), codec="int8")}
    schema["part"] = Field("int32")
    options: Any = {"schema": schema, "swap": "deck", "codec": {"x": "fp16"}, "admit": admits.get(admit, admit)}
    with CarouselBuffer(place, memory=20, storage=storage, **options) as buffer:
        rng = np.random.default_rng(0)
        for start in range(0, 50, 10):
            buffer.add(
                {
                    "x": rng.random((10, 3), np.float32),
                    "logits": np.zeros((10, 2), np.float32),
                    "text": [b"abc"] * 10,
                    "latent": rng.random((10, 4), np.float32),
                    "state": rng.random((10, 2), np.float32),
                    "part": np.arange(10, dtype=np.int32) % 2,
                },
                labels=np.arange(10) % 3,
                ids=np.arange(start, start + 10),
            )
            batch = buffer.sample(4)
            buffer.feedback(batch)
        buffer.checkpoint({"own": b"{}"})
    return "replay"


def use_replay(place: Path) -> None:
    from memhier.recsys.replay import CarouselBuffer, StoredSamples

    with StoredSamples(place) as stored:
        for _ in stored.blocks():
            pass
        _ = stored.in_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with CarouselBuffer.open(place) as buffer:
            for _ in range(8):
                batch = buffer.sample(4)
                buffer.feedback(batch)
            row = {"x": np.ones((1, 3), np.float32), "logits": np.zeros((1, 2), np.float32), "text": [b"abc"]}
            row |= {"latent": np.ones((1, 4), np.float32), "state": np.ones((1, 2), np.float32)}
            row["part"] = np.ones(1, np.int32)
            for _ in range(20):
                buffer.add(row, labels=[1])
            buffer.checkpoint()


def make_bag(place: Path, rule: str = "SGD") -> str:
    import torch

    from memhier import recsys

    torch.manual_seed(0)
    bag = recsys.EmbeddingBag(200, 4, dram="12MiB", path=place, optimizer=getattr(recsys, rule)())
    for _ in range(2):
        bag(torch.arange(10).view(2, 5)).sum().backward()
        bag.checkpoint()
    bag.close()
    return "tiered"


def use_bag(place: Path, rule: str = "SGD") -> None:
    import torch

    from memhier import recsys

    bag = recsys.EmbeddingBag(200, 4, dram="12MiB", path=place, resume=True, optimizer=getattr(recsys, rule)())
    with contextlib.closing(bag):
        bag(torch.arange(10).view(2, 5)).sum().backward()
        bag.checkpoint()


def read_bag(place: Path) -> None:
    from memhier import recsys

    with contextlib.closing(recsys.TableReader(place, dram="32MiB")) as reader:
        reader.rows(np.arange(200))
        reader.extra  # noqa: B018


def make_decoder(place: Path) -> str:
    from memhier.ann import LogitIndex

    rng = np.random.default_rng(0)
    weight = rng.standard_normal((400, 16)).astype(np.float32)
    contexts = rng.standard_normal((600, 16)).astype(np.float32)
    LogitIndex.build(weight, contexts=contexts).save(place)
    return "decoder"


def use_decoder(place: Path) -> None:
    from memhier.ann import LogitIndex

    contexts = np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)
    index = LogitIndex.open(place, verify="open")
    index.topk(contexts, 5)


KINDS: dict[str, tuple[Callable[[Path], str], Callable[[Path], None]]] = {
    "store": (make_store, use_store),
    "table": (make_table, use_table),
    "index": (make_index, use_index),
    "index-of-texts": (
        lambda place: make_index(place, ids=[f"row{row}" for row in range(400)]),
        lambda place: use_index(place, texts=True),
    ),
    "index-of-fields": (make_index_of_fields, use_index_of_fields),
    "replay": (make_replay, use_replay),
    "replay-of-quotas": (lambda place: make_replay(place, "quotas", "2MiB"), use_replay),
    "replay-of-weights": (lambda place: make_replay(place, "weights"), use_replay),
    "bag": (make_bag, use_bag),
    "bag-of-adagrad": (lambda place: make_bag(place, "Adagrad"), lambda place: use_bag(place, "Adagrad")),
    "bag-of-adam": (lambda place: make_bag(place, "Adam"), lambda place: use_bag(place, "Adam")),
    "bag-to-read": (make_bag, read_bag),
    "decoder": (make_decoder, use_decoder),
}


def main(which: str, folder: Path, every: int) -> None:
    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    make, use = KINDS[which]
    place = folder / "valid"
    kind = make(place)
    check = folder / "check"
    shutil.copytree(place, check)
    use(check)
    run(kind, place, use, folder, every)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

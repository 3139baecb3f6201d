"""The buffer at its border: arguments, budgets, fields of any kind, codecs, faults."""

import errno
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError, LockedError
from memhier.files import Fault, FaultyFiles, RealFiles
from memhier.recsys.replay import (
    CarouselBuffer,
    Field,
    GateSwap,
    LossSwap,
    RandomSwap,
    Ring,
    Schema,
    SteeredRatio,
    StoredSamples,
)
from memhier.recsys.replay.storage.records import SampleCodec
from memhier.recsys.replay.storage.storage import Storage

IMAGE = {"image": ("uint8", (8, 8, 3))}


def images(ids: np.ndarray) -> dict[str, Any]:
    return {"image": np.repeat(ids.astype(np.uint8), 192).reshape(len(ids), 8, 8, 3)}


def filled(place: Path, count: int = 60, **options: Any) -> CarouselBuffer:
    buffer = CarouselBuffer(place, **{"memory": 20, "schema": IMAGE, "seed": 3, **options})
    ids = np.arange(count)
    buffer.add(images(ids), labels=ids % 4)
    return buffer


@pytest.mark.parametrize("admit", ["reservoir", "ring", "class_balanced"])
def test_samples_added_one_by_one_are_stored_as_those_added_together(admit: str, tmp_path: Path) -> None:
    ids, kept = np.arange(150), []
    for size in (1, 150):
        with CarouselBuffer(tmp_path / f"{size}", memory=8, storage=40, schema=IMAGE, admit=admit, seed=5) as buffer:
            for some in np.split(ids, 150 // size):
                buffer.add(images(some), labels=some % 4, times=some)
            kept.append(np.sort(buffer.stored_ids()))
            buffer.forget({"before": 90})
            kept.append(np.sort(buffer.stored_ids()))
            buffer.forget({"label": 1})
            kept.append(np.sort(buffer.stored_ids()))
            assert (kept[-1] >= 90).all()
            assert (kept[-1] % 4 != 1).all()
    assert all(map(np.array_equal, kept[:3], kept[3:]))


# Arguments.


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memory": 0}, ValueError, "memory=0"),
        ({"memory": "100B"}, BudgetError, "memory='100B'"),
        ({"storage": "10B"}, BudgetError, "storage='10B'"),
        ({"admit": "fifo"}, ValueError, "'reservoir'"),
        ({"swap": "best"}, ValueError, "'gate'"),
        ({"delay": -1}, ValueError, "delay=-1"),
        ({"seed": "1"}, TypeError, "seed='1'"),
        ({"codec": {"picture": "zstd"}}, ValueError, "'picture'"),
        ({"codec": {"image": "gif"}}, ValueError, "codec='gif'"),
        ({"codec": {"image": "jpeg:101"}}, ValueError, "jpeg:101"),
        ({"codec": {"image": "int8"}}, TypeError, "float32"),
        ({"schema": {}}, ValueError, "schema"),
        ({"schema": {"a b": "int8"}}, ValueError, "'a b'"),
        ({"schema": {"a": object}}, ValueError, "plain bytes"),
        ({"admit": "class_balanced", "same_class": False}, ValueError, "same_class"),
        ({"memory": True}, TypeError, "memory=True"),
        ({"swap": RandomSwap}, TypeError, "swap=RandomSwap: .* RandomSwap(0.5)"),
        ({"admit": Ring}, TypeError, "admit=Ring: .* Ring(), not"),
        ({"codec": "jpeg"}, TypeError, "codec='jpeg': expected a dict"),
    ],
)
def test_unfit_arguments_are_named_and_leave_nothing(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(").replace(")", r"\)")):
        CarouselBuffer(tmp_path / "b", **{"memory": 4, "schema": IMAGE, **options})
    assert not (tmp_path / "b").exists()


def test_unfit_fields_are_named() -> None:
    for arguments, words in [
        (("int8", (None,)), "longest"), (("int8", (3,), 4), "longest"), (("int8", (0,)), "shape"),
        (("int8", (None,), 3, True), "mutable"), ((np.dtype("2i4"),), "dtype"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            Field(*arguments)


def test_unfit_samples_change_nothing(tmp_path: Path) -> None:
    with filled(tmp_path / "b", codec={}) as buffer:
        before = buffer.stats()
        good = images(np.arange(3))
        for batch, options, error, words in [
            ({}, {}, ValueError, "fields"),
            ([1], {}, TypeError, "dict"),
            ({"image": good["image"].astype(float)}, {}, TypeError, "float64"),
            ({"image": good["image"][:, :4]}, {}, ValueError, "shape"),
            (good, {"labels": [1, 2]}, ValueError, "labels"),
            (good, {"labels": [1, 2, -1]}, ValueError, "labels"),
            (good, {"labels": [0.5, 1, 2]}, TypeError, "labels"),
            (good, {}, ValueError, "every sample needs a label"),
            (good, {"labels": [1, 2, 3], "ids": [1]}, ValueError, "ids"),
        ]:
            with pytest.raises(error, match=words):
                buffer.add(batch, **options)  # type: ignore[arg-type]
        assert buffer.stats() == before


def test_unfit_feedback_changes_nothing(tmp_path: Path) -> None:
    with filled(tmp_path / "b", swap=GateSwap(1.0)) as buffer:
        batch = buffer.sample(4)
        for arguments, words in [
            ({}, "logits"),
            ({"scores": np.zeros((3, 4))}, "logits"),
            ({"scores": np.full((4, 4), np.nan)}, "finite"),
            ({"scores": np.zeros((4, 4)), "update": {"image": batch["image"]}}, "mutable"),
        ]:
            with pytest.raises(ValueError, match=words):
                buffer.feedback(batch, **arguments)
        with pytest.raises(ValueError, match="slot"):
            buffer.feedback([20], scores=np.zeros((1, 4)))
        assert buffer.step == 0
    with filled(tmp_path / "c", swap=LossSwap(1.0)) as buffer, pytest.raises(ValueError, match="loss"):
        buffer.feedback(buffer.sample(4))


def test_a_buffer_that_is_empty_or_small(tmp_path: Path) -> None:
    with CarouselBuffer(tmp_path / "b", memory=1, schema=IMAGE, swap=RandomSwap(1.0)) as buffer:
        assert len(buffer.sample(5)) == 0
        buffer.feedback(buffer.sample(5))
        buffer.add(images(np.arange(0)))
        for number in range(5):
            buffer.add(images(np.arange(number, number + 1)))
            batch = buffer.sample(3)
            assert len(batch) == 1
            assert batch["image"][0, 0, 0, 0] == batch.ids[0]
            buffer.feedback(batch)
        assert buffer.stats()["swapped"] > 0
        with pytest.raises(ValueError, match="n=-1"):
            buffer.sample(-1)
        with pytest.raises(TypeError, match=r"n=1\.0: expected an int"):
            buffer.sample(1.0)  # type: ignore[arg-type]


def test_out_is_filled_in_place(tmp_path: Path) -> None:
    with filled(tmp_path / "b") as buffer:
        out = buffer.empty(5)
        batch = buffer.sample(5, out)
        assert batch is out
        fewer = buffer.sample(3, out)
        assert np.shares_memory(fewer["image"], out["image"])
        assert fewer["image"][:, 0, 0, 0].tolist() == fewer.ids.tolist()
        with pytest.raises(ValueError, match="holds 5"):
            buffer.sample(6, out)


# Budgets.


def test_bytes_of_storage_are_kept_to(tmp_path: Path) -> None:
    with CarouselBuffer(tmp_path / "b", memory=5, storage="2MiB", schema=IMAGE) as buffer:
        for start in range(0, 40_000, 1000):
            buffer.add(images(np.arange(start, start + 1000)))
            buffer.checkpoint()
            assert buffer.stats()["storage_bytes"] <= 2 * 2**20
        assert buffer.stats()["storage_samples"] == buffer.stats()["storage_limit"] > 2700  # each of them twice


def test_bytes_of_storage_are_kept_to_with_a_large_memory(tmp_path: Path) -> None:
    schema = {"x": "int64", "logits": Field("float32", (20,), mutable=True)}
    with CarouselBuffer(tmp_path / "b", memory=50_000, storage="1MiB", schema=schema, swap=RandomSwap(1.0)) as buffer:
        for start in range(0, 20_000, 250):
            buffer.add({"x": np.arange(start, start + 250), "logits": np.zeros((250, 20), np.float32)})
            batch = buffer.sample(125)
            buffer.feedback(batch, update={"logits": np.ones((len(batch), 20), np.float32)})
            buffer.checkpoint()
            assert buffer.stats()["storage_bytes"] <= 2**20
        assert len(buffer) == buffer.stats()["storage_samples"] == buffer.stats()["storage_limit"] > 1500


def test_slots_never_used_take_no_storage(tmp_path: Path) -> None:
    with CarouselBuffer(tmp_path / "b", memory=100, storage="1MiB", schema={"x": "int64"}) as buffer:
        buffer.add({"x": np.arange(500)})
        buffer.checkpoint()
        for slots in (50_000, 70_000):
            buffer.resize(memory=slots)
            for _ in range(2):
                buffer.feedback(buffer.sample(9))
            buffer.checkpoint()
            assert buffer.stats()["storage_bytes"] <= 2**20
        inside = buffer.sample(500)
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        found = buffer.reader().read(inside.slots)
        assert (buffer.capacity, len(buffer), found.ids.tolist()) == (70_000, 500, inside.ids.tolist())


def test_everything_refuses_samples_that_do_not_fit(tmp_path: Path) -> None:
    with filled(tmp_path / "b", admit="everything", storage=61) as buffer:
        with pytest.raises(BudgetError, match="storage=61"):
            buffer.add(images(np.arange(2)), labels=[0, 0])
        buffer.add(images(np.arange(1)), labels=[0])


def test_memory_grows_and_shrinks(tmp_path: Path) -> None:
    with filled(tmp_path / "b") as buffer:
        buffer.resize(memory=50)
        assert len(buffer) == 20
        for _ in range(3):
            buffer.feedback(buffer.sample(4))
        assert len(buffer) == buffer.capacity == 50
        stale = buffer.sample(40)
        buffer.resize(memory=7)
        assert len(buffer) == 7
        step = buffer.step
        with pytest.raises(ValueError, match=r"batch: was drawn when memory had more than its 7 slots"):
            buffer.feedback(stale)
        assert buffer.step == step
        buffer.checkpoint()
    with CarouselBuffer.open(tmp_path / "b", memory=9) as buffer:
        assert buffer.capacity == 9
        buffer.resize(storage=12)
        assert buffer.stats()["storage_samples"] == 12
        for _ in range(2):  # samples of memory may be among those that storage has dropped
            buffer.feedback(buffer.sample(4))
        assert len(buffer) == 9
        buffer.add(images(np.arange(30)), labels=np.zeros(30, np.int64))
        with pytest.raises(ValueError, match="the others are gone"):
            buffer.resize(storage=20)


def test_a_steered_ratio_gives_way_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ratio, read = SteeredRatio(0.8, tolerance=0.01), Storage.read_settled

    def slow(*arguments: Any) -> None:
        time.sleep(0.05)
        read(*arguments)

    monkeypatch.setattr(Storage, "read_settled", slow)
    with filled(tmp_path / "b", swap=RandomSwap(ratio)) as buffer:
        for _ in range(6):
            buffer.feedback(buffer.sample(5))
        assert ratio.share() < 0.4
        ratio.stalled(0.0, 1.0)
        low = ratio.share()
        for _ in range(200):
            ratio.stalled(0.0, 1.0)
        assert low < ratio.share() == 0.8


def test_the_arrays_of_a_batch_can_be_used_again(tmp_path: Path) -> None:
    """Even those of a sample that takes the position of another, which a swap is bringing into memory."""
    values = np.zeros(3, np.int64)
    options: dict[str, Any] = {"schema": {"x": "int64"}, "admit": "ring", "swap": RandomSwap(1.0), "delay": 3}
    with CarouselBuffer(tmp_path / "b", memory=6, storage=14, **options) as buffer:
        for step in range(60):
            values[:] = np.arange(3 * step, 3 * step + 3)
            buffer.add({"x": values}, ids=values.copy())
            values[:] = -1
            batch = buffer.sample(6)
            assert batch["x"].tolist() == batch.ids.tolist()
            buffer.feedback(batch)


# Fields and codecs.


@pytest.mark.parametrize("codec", ["none", "zstd", "jpeg", "jpeg:60", "webp:80"])
@pytest.mark.parametrize("shape", [(16, 20, 3), (3, 16, 20), (16, 20), (16, 20, 1)])
def test_images_come_back(tmp_path: Path, codec: str, shape: tuple[int, ...]) -> None:
    pytest.importorskip("PIL")
    # Smooth images, which lossy codecs keep.
    base = np.add.outer(np.arange(16) * 4, np.arange(20) * 3)
    channels_last = np.moveaxis(np.empty(shape), 0, -1).shape if shape[0] == 3 else shape
    one = np.broadcast_to(base.reshape(base.shape + (1,) * (len(shape) - 2)), channels_last)
    one = np.moveaxis(one, -1, 0) if shape[0] == 3 else one
    pictures = np.stack([one + number for number in range(30)]).astype(np.uint8)
    with CarouselBuffer(tmp_path / "b", memory=30, schema={"image": ("uint8", shape)}, codec={"image": codec}) as b:
        b.add({"image": pictures})
        shown = b.reader().read(np.arange(30))
        b.checkpoint()
        with StoredSamples(tmp_path / "b") as storage:
            stored = storage.read(shown.ids)
        # Memory shows the image that storage holds, so that being swapped changes nothing.
        np.testing.assert_array_equal(shown["image"], stored["image"])
        error = np.abs(shown["image"].astype(int) - pictures[shown.ids]).mean()
        assert error == 0 if codec in ("none", "zstd") else 0 < error + 1e-9 < 3


def test_latents_text_and_side_data(tmp_path: Path) -> None:
    schema = {
        "latent": ("float32", (7,)), "text": Field("uint8", (None,), longest=9), "points": Field("int16", (None, 2), 3),
        "logits": Field("float32", (4,), mutable=True), "nothing": Field("float64"),
    }  # fmt: skip
    random = np.random.default_rng(0)
    latents, logits = (random.normal(size=(50, width)).astype(np.float32) for width in (7, 4))
    texts = [b"x" * (number % 10) for number in range(50)]
    points = [np.full((number % 4, 2), number, np.int16) for number in range(50)]
    batch = {"latent": latents, "text": texts, "points": points, "logits": logits, "nothing": np.arange(50.0)}
    codec = {"latent": "int8", "text": "zstd", "logits": "fp16"}
    with CarouselBuffer(tmp_path / "b", memory=8, schema=schema, codec=codec, swap=RandomSwap(1.0)) as buffer:
        buffer.add(batch)
        given: dict[int, float] = {}
        for step in range(30):
            used = buffer.sample(4)
            assert [bytes(text) for text in used.ragged("text")] == [texts[id] for id in used.ids]
            for value, id in zip(used.ragged("points"), used.ids, strict=True):
                np.testing.assert_array_equal(value, points[id])
            np.testing.assert_allclose(used["latent"], latents[used.ids], atol=0.03)
            for row, id in zip(used["logits"], used.ids.tolist(), strict=True):
                expected = np.full(4, given[id]) if id in given else logits[id]
                np.testing.assert_allclose(row, expected, rtol=2e-3, atol=1e-6)
            buffer.feedback(used, update={"logits": np.full((4, 4), step, np.float32)})
            given |= dict.fromkeys(used.ids.tolist(), float(step))
        assert len(given) > 20
        for bad in (np.nan, 1e30):
            with pytest.raises(ValueError, match="logits" if bad > 1 else "latent"):
                buffer.add({name: values[:1] for name, values in batch.items()} | (
                    {"logits": np.full((1, 4), bad, np.float32)} if bad > 1 else
                    {"latent": np.full((1, 7), bad, np.float32)}
                ))  # fmt: skip


@pytest.mark.parametrize("kind", ["packed", "rows"])
def test_a_record_that_is_not_one_is_told(tmp_path: Path, kind: str) -> None:
    codec = {"image": "zstd"} if kind == "packed" else {}
    with filled(tmp_path / "b", codec=codec) as buffer:
        buffer.checkpoint()
    schema = Schema(IMAGE)
    storage = Storage(Storage.open_store(tmp_path / "b", writable=False)[0], schema, codec, False)
    with closing(storage), pytest.raises(CorruptionError, match="no sample"):
        storage.read(np.array([60]), schema.empty(1))
    if kind == "packed":
        packed = SampleCodec(schema, ["image"], codec)
        with pytest.raises(CorruptionError, match="bytes"):
            packed.unpack_records([memoryview(b"\1\2\3")], schema.empty(1))
        with pytest.raises(CorruptionError):
            packed.unpack_records([memoryview(b"\3\0\0\0abc")], schema.empty(1))


# Faults.


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    def saved(place: Path, files: FaultyFiles) -> CarouselBuffer:
        buffer = CarouselBuffer(place, memory=5, schema=IMAGE, files=files)
        buffer.add(images(np.arange(50)))
        buffer.checkpoint()
        return buffer

    counting = FaultyFiles(RealFiles())
    with saved(tmp_path / "counted", counting):
        before = len(counting.calls)
    buffer = saved(tmp_path / "b", FaultyFiles(RealFiles(), before + 3, Fault.ENOSPC))
    kept = buffer.reader().read(np.arange(5)).ids.tolist()
    with pytest.raises(OSError, match="No space") as caught:
        buffer.add(images(np.arange(40_000)))
    assert caught.value.errno == errno.ENOSPC
    for call in (buffer.checkpoint, lambda: buffer.add(images(np.arange(1))), lambda: buffer.feedback([0])):
        with pytest.raises(ClosedError, match="open it again"):
            call()
    assert len(buffer.sample(3)) == 3
    buffer.close()
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        assert buffer.stats()["storage_samples"] == 50
        assert buffer.reader().read(np.arange(5)).ids.tolist() == kept


def test_a_damaged_sample_is_named_and_training_goes_on(tmp_path: Path) -> None:
    with filled(tmp_path / "b", count=200, memory=10, swap=RandomSwap(1.0), same_class=False) as buffer:
        buffer.checkpoint()
    victim = next(file for file in (tmp_path / "b" / "segments").iterdir() if file.name.startswith("samples-0."))
    data = bytearray(victim.read_bytes())
    data[4096 * 3] ^= 1
    victim.write_bytes(data)
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        failed = None
        for _ in range(200):
            try:
                buffer.feedback(buffer.sample(5))
            except CorruptionError as error:
                failed = error
                break
        assert failed is not None
        note = failed.__notes__[0]
        assert "forget({'id'" in note
        # The step has ended, everything else is as it should be.
        assert buffer.stats()["errors"] == 1
        assert len(buffer) == 10
        for _ in range(5):
            with pytest.MonkeyPatch.context():
                batch = buffer.sample(5)
                assert batch["image"][:, 0, 0, 0].tolist() == batch.ids.tolist()
        assert any(not finding.harmless for finding in buffer.check())


def test_other_stores_other_schemas_and_other_writers(tmp_path: Path) -> None:
    with filled(tmp_path / "b") as buffer:
        buffer.checkpoint()
        with pytest.raises(LockedError):
            CarouselBuffer.open(tmp_path / "b")
    with pytest.raises(FileExistsError):
        CarouselBuffer(tmp_path / "b", memory=4, schema=IMAGE)
    with pytest.raises(FormatError, match="expected Schema"):
        CarouselBuffer.open(tmp_path / "b", schema={"image": ("uint8", (4, 4))})
    with CarouselBuffer.open(tmp_path / "b", schema=IMAGE) as buffer:
        assert len(buffer) == 20
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.sample(1)
    with pytest.raises(FileNotFoundError):
        CarouselBuffer.open(tmp_path / "nothing")
    (tmp_path / "other").mkdir()
    with pytest.raises(FormatError):
        CarouselBuffer.open(tmp_path / "other")


# Forgetting.


def test_forgotten_samples_are_nowhere(tmp_path: Path) -> None:
    secret = np.random.default_rng(9).integers(0, 256, (5, 8, 8, 3), np.uint8)
    with filled(tmp_path / "b", memory=70) as buffer:
        buffer.add({"image": secret}, labels=[3] * 5, ids=range(1000, 1005))
        buffer.checkpoint()
        files = list((tmp_path / "b").rglob("*"))
        assert any(secret[2].tobytes() in file.read_bytes() for file in files if file.is_file())
        report = buffer.forget({"id": range(1000, 1005), "label": 3})
        assert report == {"samples": 5, "memory_samples": 5}
        for file in (tmp_path / "b").rglob("*"):
            if file.is_file():
                assert not any(one.tobytes()[:64] in file.read_bytes() for one in secret), file
        shown = buffer.reader().read(np.arange(buffer.capacity))["image"]
        assert not any(one.tobytes() in shown.tobytes() for one in secret)
        assert buffer.forget(lambda ids, labels: labels == 1)["samples"] == 15
        assert buffer.stats()["storage_samples"] == 45
        for where, words in [({}, "where"), ({"name": 1}, "where"), (lambda ids, labels: ids, "bool")]:
            with pytest.raises(ValueError, match=words):
                buffer.forget(where)  # type: ignore[arg-type]
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        assert buffer.stats()["storage_samples"] == 45

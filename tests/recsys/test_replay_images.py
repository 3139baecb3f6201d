"""Images packed without loss, on SSD and in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier import CorruptionError
from memhier.recsys.replay import CarouselBuffer, Field, Reservoir, Schema, StoredSamples
from memhier.recsys.replay.codecs.choice import field_codec, longest_of
from memhier.recsys.replay.schema import Column
from memhier.recsys.replay.settings import BufferSettings

pytest.importorskip("PIL.Image", reason="needs memhier[images]")

SHAPES = [(7, 9), (16, 16, 1), (13, 5, 3), (3, 8, 11), (1, 6, 4), (40, 1), (1, 1, 3), (64, 64, 3)]


def smooth(count: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return images that pack well: slopes with a little noise."""
    random = np.random.default_rng(seed)
    slopes = random.integers(0, 4, (count, len(shape)))
    total = sum(
        (slopes[:, axis] * 1).reshape(-1, *[1] * len(shape)) * np.arange(length).reshape([1, *[-1 if at == axis else 1
        for at in range(len(shape))]]) for axis, length in enumerate(shape)
    )  # fmt: skip
    return (total + random.integers(0, 3, (count, *shape))).astype(np.uint8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["png", "webp:lossless", "lossless", "jxl"])
def test_images_come_back_as_they_were(name: str, shape: tuple[int, ...]) -> None:
    if name == "jxl":
        pytest.importorskip("pillow_jxl", reason="needs memhier[jxl]")
    column = Column(np.dtype(np.uint8), shape)
    codec = field_codec(name, column)
    noise = np.random.default_rng(1).integers(0, 256, (20, *shape), np.uint8)
    values = np.concatenate(
        [smooth(20, shape), noise, np.zeros((2, *shape), np.uint8), np.full((2, *shape), 255, np.uint8)]
    )
    records: Any = codec.encode(values)
    assert codec.lossless
    assert max(map(len, records)) <= longest_of(codec, column) == column.bytes
    out = np.empty_like(values)
    codec.decode([memoryview(record) for record in records], out)
    np.testing.assert_array_equal(out, values)
    if name == "lossless":
        others = [field_codec(other, column).encode(values) for other in ("png", "webp:lossless")]
        assert [len(record) for record in records] == [min(map(len, pair)) for pair in zip(*others, strict=True)]
    assert codec.encode(values[:0]) == []


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_buffer_of_packed_images_gives_them_back(tmp_path: Path, in_memory: bool) -> None:
    shape = (24, 24, 3)
    images = np.concatenate([smooth(280, shape), np.random.default_rng(2).integers(0, 256, (20, *shape), np.uint8)])
    images = images[np.random.default_rng(3).permutation(300)]
    field = Field("uint8", shape, codec="lossless", mean=800) if in_memory else Field("uint8", shape)
    options: Any = {} if in_memory else {"codec": {"image": "lossless"}}
    place = tmp_path / "b"
    settings = BufferSettings(Schema({"image": field}), {}, Reservoir(), None, 0, 1, None)
    slots = settings.slots_within(192 * 2**10)
    with CarouselBuffer(place, memory=slots, schema={"image": field}, seed=3, **options) as buffer:
        for start in range(0, 300, 20):
            buffer.add({"image": images[start : start + 20]})
            batch = buffer.sample(10)
            np.testing.assert_array_equal(batch["image"], images[batch.ids])
            np.testing.assert_array_equal(buffer.reader().read(batch.slots)["image"], batch["image"])
            buffer.feedback(batch)
        assert (len(buffer) > 1.4 * 192 * 2**10 / images[0].nbytes) == in_memory
        buffer.forget({"id": range(0, 300, 7)})
        buffer.checkpoint()
        assert buffer.stats()["storage_bytes"] < 0.6 * images.nbytes + 2**17
    with StoredSamples(place) as stored:
        batch = stored.read(np.arange(len(stored)))
        np.testing.assert_array_equal(batch["image"], images[batch.ids])
    with CarouselBuffer.open(place) as buffer:
        batch = buffer.sample(1000)
        np.testing.assert_array_equal(batch["image"], images[batch.ids])


@pytest.mark.parametrize("name", ["png", "webp:lossless", "jxl"])
def test_a_record_that_is_no_image_is_told(name: str) -> None:
    if name == "jxl":
        pytest.importorskip("pillow_jxl", reason="needs memhier[jxl]")
    codec = field_codec(name, Column(np.dtype(np.uint8), (4, 4)))
    other: Any = field_codec(name, Column(np.dtype(np.uint8), (30, 30))).encode(smooth(1, (30, 30)))
    for record in (b"", b"no image", other[0], other[0][: len(other[0]) // 2]):
        with pytest.raises(CorruptionError, match=name):
            codec.decode([memoryview(record)], np.empty((1, 4, 4), np.uint8))


def test_unfit_fields_are_told(tmp_path: Path) -> None:
    for field, error in (
        (Field("float32", (4, 4), codec="png"), "uint8"),
        (Field("uint8", (4, 4), codec="lossless", mutable=True), "mutable"),
        (Field("float32", (4, 4), codec="int8", mean=9), "mean"),
        (Field("uint8", (4, 4), codec="webp:better"), "quality"),
    ):
        with pytest.raises(ValueError, match=error):
            CarouselBuffer(tmp_path / "b", memory=4, schema={"x": field})

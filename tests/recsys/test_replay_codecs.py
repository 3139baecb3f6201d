"""Fields that both tiers hold in a codec of their own: int8, halves, product codes, next to the codec alone."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier import BudgetError, CorruptionError, FormatError, Store, get_codec
from memhier.recsys.replay import CarouselBuffer, Field, ProductCodes, RandomSwap, Reservoir, Schema, StoredSamples
from memhier.recsys.replay.loader import ReplayBatchSampler
from memhier.recsys.replay.settings import BufferSettings

RANDOM = np.random.default_rng(3)
SHAPE = (4, 6)
LATENTS = (RANDOM.standard_normal((400, *SHAPE)) * RANDOM.lognormal(0, 3, (400, 1, 1))).astype(np.float32)
CODES = ProductCodes.train(LATENTS, 12, seed=5)
CODECS: list[Any] = ["int8", "fp16", "bf16", CODES]


def schema(codec: Any, mutable: bool = False) -> dict[str, Any]:
    return {"latent": Field("float32", SHAPE, mutable=mutable, codec=codec), "task": "int16"}


def samples(which: np.ndarray) -> dict[str, np.ndarray]:
    return {"latent": LATENTS[which], "task": which.astype(np.int16)}


def decoded(codec: Any, values: np.ndarray) -> np.ndarray:
    """Return values as the codec alone gives them back."""
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    if isinstance(codec, ProductCodes):
        out = np.empty_like(flat)
        codec.decode(codec.encode(flat), out)
    else:
        out = get_codec(codec).decode(get_codec(codec).encode(flat))
    return out.reshape(values.shape)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("mutable", [False, True])
def test_a_sample_is_the_same_wherever_it_is_read(tmp_path: Path, codec: Any, mutable: bool) -> None:
    expected = decoded(codec, LATENTS)
    place, made = tmp_path / "b", schema(codec, mutable)

    def check(batch: Any) -> None:
        np.testing.assert_array_equal(batch["latent"], expected[batch.ids])
        np.testing.assert_array_equal(batch["task"], batch.ids)

    with CarouselBuffer(place, memory=40, storage=300, schema=made, delay=0, seed=1) as buffer:
        for start in range(0, 400, 50):
            buffer.add(samples(np.arange(start, start + 50)), labels=np.arange(50) % 3)
            batch = buffer.sample(20)
            check(batch)
            check(pickle.loads(pickle.dumps(buffer.reader())).read(batch.slots))
            buffer.feedback(batch)
        sampler = ReplayBatchSampler(buffer, 8, steps=10, ahead=4)
        iterator = iter(sampler)
        drawn = [next(iterator) for _ in range(3)]
        buffer.forget({"id": range(0, 400, 9)})
        buffer.resize(memory=30)
        if mutable:
            changed = buffer.sample(5)
            expected[changed.ids] = decoded(codec, -changed["latent"])
            buffer.refresh(changed, {"latent": -changed["latent"]})
        buffer.checkpoint()
        for batch in drawn:
            assert len(batch)
        with buffer.dataset() as stored:
            check(stored.read(np.arange(len(stored))))
    with CarouselBuffer.open(place, schema=made) as buffer:
        assert buffer.schema == Schema(made)
        check(buffer.sample(30))
        assert len(iter(ReplayBatchSampler(buffer, 8, steps=10, ahead=4)).__next__())
        assert buffer.check() == []
    with pickle.loads(pickle.dumps(StoredSamples(place))) as stored:
        assert stored.schema == Schema(made)
        check(stored.read(np.arange(len(stored))))
    with pytest.raises(FormatError, match="expected"):
        CarouselBuffer.open(place, schema=schema(None, mutable))


def slots_in(size: int, fields: dict[str, Any]) -> int:
    """Return how many slots so many bytes hold, without buffers."""
    return BufferSettings(Schema(fields), {}, Reservoir(), None, 0, 1, None).slots_within(size)


@pytest.mark.parametrize(("codec", "times"), [("int8", 3.5), (CODES, 6), ("fp16", 1.9)], ids=str)
def test_a_budget_of_memory_holds_more(tmp_path: Path, codec: Any, times: float) -> None:
    wide = {"latent": Field("float32", (16, *SHAPE), codec=None)}
    if isinstance(codec, ProductCodes):
        codec = ProductCodes(np.tile(CODES.centres, (16, 1, 1)))
    plain, coded = (
        CarouselBuffer(tmp_path / str(number), memory=slots_in(2**20, made), storage="4MiB", schema=made)
        for number, made in enumerate((wide, {"latent": Field("float32", (16, *SHAPE), codec=codec)}))
    )
    with plain, coded:
        assert coded.capacity > times * plain.capacity
        assert coded.stats()["storage_limit"] > times / 2 * plain.stats()["storage_limit"]
        for start in range(0, 6000, 500):
            some = RANDOM.standard_normal((500, 16, *SHAPE), np.float32)
            coded.add({"latent": some})
            coded.checkpoint()
            assert sum(file.stat().st_size for file in (tmp_path / "1").rglob("*") if file.is_file()) <= 4 * 2**20, (
                start
            )
        assert len(coded) == coded.capacity


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_int8_is_off_by_half_a_step_at_most(tmp_path: Path, scale: float) -> None:
    values = (RANDOM.standard_cauchy((300, 3, 7)) * scale).astype(np.float32)
    values[0] = 0
    with CarouselBuffer(tmp_path / "b", memory=300, schema={"x": Field("float32", (3, 7), codec="int8")}) as buffer:
        buffer.add({"x": values})
        batch = buffer.sample(300)
    bound = 0.5001 / 127 * np.abs(values).max(axis=(1, 2), keepdims=True).astype(np.float64)
    assert (np.abs(batch["x"].astype(np.float64) - values[batch.ids]) <= bound[batch.ids] + 2.0**-126).all()


def test_product_codes_choose_the_nearest_centre_and_come_from_their_seed() -> None:
    values = RANDOM.standard_normal((500, 10), np.float32)
    codes, again, other = (ProductCodes.train(values, 5, seed=seed) for seed in (7, 7, 8))
    assert codes.digest == again.digest != other.digest
    assert ProductCodes.decoded(codes.value).digest == codes.digest
    for part in range(5):
        gaps = np.square(values[:, None, 2 * part : 2 * part + 2].astype(np.float64) - codes.centres[part]).sum(axis=2)
        chosen = gaps[np.arange(500), codes.encode(values)[:, part]]
        np.testing.assert_allclose(chosen, gaps.min(axis=1), atol=1e-5)
    error = np.square(decoded(codes, values) - values).sum()
    fewer = ProductCodes.train(values, 2, seed=7)
    assert error < np.square(decoded(fewer, values) - values).sum() < np.square(values - values.mean(axis=0)).sum()
    alike = ProductCodes.train(np.ones((256, 4), np.float32), 2, seed=0)
    np.testing.assert_array_equal(decoded(alike, np.ones((3, 4), np.float32)), 1)
    assert alike.encode(np.empty((0, 4), np.float32)).shape == (0, 2)


@pytest.mark.parametrize(("middle", "scale"), [(0, 1e-3), (1e4, 1), (-3e5, 1), (0, 1e14), (1e15, 1e10)])
def test_product_codes_choose_the_nearest_centre_far_from_zero(middle: float, scale: float) -> None:
    random = np.random.default_rng(4)
    values = (middle + scale * random.uniform(-1, 0, (600, 8))).astype(np.float32)
    codes = ProductCodes.train(values[:500], parts=2, seed=1)
    cut, centres = (some.astype(np.float64) for some in (values.reshape(600, 2, 1, 4), codes.centres))
    distances = np.square(cut - centres).sum(axis=3)
    chosen = np.take_along_axis(distances, codes.encode(values)[:, :, None].astype(np.int64), 2)[..., 0]
    assert (chosen <= distances.min(axis=2) + 1e-4 * (16 * scale**2)).all()
    with pytest.raises(ValueError, match="beyond 1e"):
        codes.encode(np.full((1, 8), 1e16, np.float32))


def test_product_codes_keep_centres_that_the_caller_changes(tmp_path: Path) -> None:
    centres = RANDOM.standard_normal((4, 256, 2), np.float32)
    codes = ProductCodes(centres)
    values = centres[:, :20].swapaxes(0, 1).reshape(20, 8).copy()
    schema = {"x": Field("float32", (8,), codec=codes)}
    with CarouselBuffer(tmp_path / "b", memory=20, schema=schema) as buffer:
        buffer.add({"x": values})
        centres[:] = 0
        buffer.checkpoint()
        batch = buffer.sample(20)
    assert np.array_equal(batch["x"], values[batch.ids])
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        batch = buffer.sample(20)
    assert np.array_equal(batch["x"], values[batch.ids])


def test_copies_of_product_codes_keep_their_centres() -> None:
    codes = ProductCodes(RANDOM.standard_normal((4, 256, 2), np.float32))
    assert codes.digest
    for same in (copy.copy(codes), copy.deepcopy(codes), pickle.loads(pickle.dumps(codes))):
        assert same.digest == codes.digest
        with pytest.raises(ValueError, match="read-only"):
            same.centres[:] = 0


def test_unfit_codecs_and_values_change_nothing(tmp_path: Path) -> None:
    for codec, shape, error in (
        ("int9", SHAPE, "int9"), ("jpeg", SHAPE, "uint8"), (CODES, (5,), "product codes of float32"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            CarouselBuffer(tmp_path / "b", memory=4, schema={"x": Field("float32", shape, codec=codec)})
    with pytest.raises(ValueError, match="a codec of its own"):
        CarouselBuffer(tmp_path / "b", memory=4, schema=schema("int8"), codec={"latent": "zstd"})
    with pytest.raises(ValueError, match="no codec here"):
        CarouselBuffer(tmp_path / "b", memory=4, schema={"x": Field("uint8", (None,), longest=4, codec="zstd")})
    with pytest.raises(TypeError, match="codec=3"):
        Field("float32", SHAPE, codec=3)  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="one sample"):
        CarouselBuffer(tmp_path / "b", memory=4, storage="100KiB", schema=schema(CODES))
    assert not (tmp_path / "b").exists()
    for codec in ("int8", CODES):
        place = tmp_path / str(codec)
        with CarouselBuffer(place, memory=4, schema=schema(codec)) as buffer:
            unfit = samples(np.arange(3))
            unfit["latent"] = np.full((3, *SHAPE), np.nan, np.float32)
            with pytest.raises(ValueError, match=r"latent.*NaN"):
                buffer.add(unfit)
            assert buffer.stats()["arrivals"] == 0
    for values, parts, error in (
        (LATENTS[:255], 4, "256"), (LATENTS, 5, "divisor"), (LATENTS * np.float32(np.inf), 4, "finite"),
        (LATENTS[:, 0, 0], 1, "shape"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=error), np.errstate(invalid="ignore"):
            ProductCodes.train(values, parts, seed=0)
    with pytest.raises(TypeError, match="float32"):
        ProductCodes.train(LATENTS.astype(np.float64), 4, seed=0)


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_unfit_update_is_named_and_changes_nothing(tmp_path: Path, in_memory: bool) -> None:
    field = Field("float32", (3,), codec="int8" if in_memory else None, mutable=True)
    fields: Any = {"x": field, "other": field}
    codec = None if in_memory else {"x": "int8", "other": "int8"}
    with CarouselBuffer(tmp_path / "b", memory=4, schema=fields, codec=codec, seed=0) as buffer:
        buffer.add(dict.fromkeys(fields, np.ones((9, 3), np.float32)))
        batch = buffer.sample(2)
        for bad in (np.nan, np.inf, -np.inf):
            unfit = {"x": np.array([[0, 1, 2], [0, bad, 2]], np.float32)}
            for call in (buffer.feedback, buffer.refresh):
                with pytest.raises(ValueError, match=r"update\['x'\]: rows\[1, 1\]"):
                    call(batch, update=unfit)
        assert buffer.step == 0
        assert (buffer.sample(4)["x"] == 1).all()
        buffer.feedback(batch, update={"x": np.full((2, 3), 2, np.float32)})


@pytest.mark.parametrize("mutable", [True, False])
@pytest.mark.parametrize("in_memory", [True, False])
def test_int8_of_extreme_latents_is_as_exact_as_it_says(tmp_path: Path, in_memory: bool, mutable: bool) -> None:
    large, least = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    rows = [[large, -large, 1], [large, 1e-38, least], [3.3] * 3, [-0.0, 0, -0.0], [1.2e-38, -1e-38, 0], [least, 0, 0]]
    values = np.array(rows, np.float32)
    field = Field("float32", (3,), codec="int8" if in_memory else None, mutable=mutable)
    codec = None if in_memory else {"x": "int8"}
    place = tmp_path / "b"
    with CarouselBuffer(place, memory=2, schema={"x": field}, codec=codec, swap=RandomSwap(1.0), seed=0) as buffer:
        buffer.add({"x": values})
        seen = set()
        for _ in range(40):
            batch = buffer.sample(2)
            wanted = values[batch.ids].astype(np.float64)
            bound = np.maximum(np.abs(wanted).max(axis=1, keepdims=True) / 127, 2.0**-126)
            assert (np.abs(batch["x"].astype(np.float64) - wanted) <= 0.5001 * bound).all()
            seen |= {*batch.ids.tolist()}
            buffer.feedback(batch, update={"x": batch["x"]} if mutable else None)
        assert len(seen) == len(values)


@pytest.mark.parametrize("value", [b"", b"no array", None, "other"])
def test_lost_or_damaged_product_codes_are_told(tmp_path: Path, value: Any) -> None:
    place = tmp_path / "b"
    with CarouselBuffer(place, memory=4, schema=schema(CODES)) as buffer:
        buffer.add(samples(np.arange(20)))
        buffer.checkpoint()
    with Store.open(place, "replay", writable=True) as store, store.begin() as tx:
        if value is None:
            tx.delete("replay/codes/latent")
        else:
            other = ProductCodes(CODES.centres + np.float32(1)).value
            tx.put("replay/codes/latent", other if value == "other" else value)
        tx.commit()
    for open_it in (CarouselBuffer.open, StoredSamples):
        with pytest.raises(CorruptionError, match="codes"):
            open_it(place)


def test_product_codes_whose_header_is_cut_short_are_refused() -> None:
    value = ProductCodes.train(np.random.default_rng(1).random((256, 4), np.float32), 2, seed=0).value
    with pytest.raises(ValueError, match="the header of an array ends too soon"):
        ProductCodes.decoded(value.replace(b"2)", b"2 ", 1))

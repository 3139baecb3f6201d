"""What reads cost: the model against arithmetic, forecasts against schedules worked out by hand."""

import json
from typing import Any

import numpy as np
import pytest

from memhier.io.device import DepthProfile, DeviceProfile
from memhier.planning.cost import CostModel
from memhier.planning.simulation import simulate


def skewed(count: int, keys: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return (keys * np.random.default_rng(0).random(count) ** 3).astype(np.int64)


def profile(**changes: Any) -> DeviceProfile:
    depths = tuple(DepthProfile(depth, iops, iops * 4096 / 1e6, 100.0, 200.0, 1000) for depth, iops in ROWS)
    fields: dict[str, Any] = {
        "path": "/disk", "file_system": "ext4", "device": "/dev/x", "kernel": "k", "date": "d", "engine": "uring",
        "direct": True, "page_bytes": 4096, "span_bytes": 2**30, "seed": 0, "sequential_mb_per_s": 1_500.0,
        "depths": depths, "notes": (),
    }  # fmt: skip
    return DeviceProfile(**(fields | changes))


ROWS = ((1, 9_000.0), (4, 30_000.0), (64, 100_000.0))


def test_rates_pass_through_the_profile_and_stay_between() -> None:
    model = CostModel.of(profile())
    assert CostModel.of(profile().to_json()) == model == CostModel.of(model)
    for depth, iops in ROWS:
        assert model.reads_per_s(depth) == pytest.approx(iops)
    assert 30_000 < float(model.reads_per_s(16)) < 100_000
    assert model.reads_per_s(1_000) == pytest.approx(100_000)
    assert model.latency_s(4) == pytest.approx(4 / 30_000)
    assert np.allclose(model.reads_per_s([1, 4, 64]), [9_000, 30_000, 100_000])


def test_time_of_batches() -> None:
    model = CostModel.of(profile())
    assert model.batch_s(0) == 0.0
    assert model.batch_s(1) == pytest.approx(1 / 9_000)
    assert model.batch_s(4) == pytest.approx(4 / 30_000)
    assert model.batch_s(10_000) == pytest.approx(0.1)
    assert model.batch_s(10_000, depth=4) == pytest.approx(10_000 / 30_000)
    assert model.batch_s(100, read_bytes=2**20) == pytest.approx(100 * 2**20 / 1.5e9)
    assert np.allclose(model.batch_s([0, 1, 4]), [0, 1 / 9_000, 4 / 30_000])
    assert model.append_s(3_000_000) == pytest.approx(0.002)
    times = np.asarray(model.batch_s(np.arange(1, 500)))
    assert np.all(np.diff(times) > 0)


def test_reads_hide_behind_compute() -> None:
    model = CostModel("disk", (1,), (1_000.0,), 1e9)
    serial = model.forecast([10] * 50, compute_s=0.02, ahead=0)
    assert (serial.io_s, serial.compute_s, serial.stall_s) == pytest.approx((0.5, 1.0, 0.5))
    assert serial.hidden == pytest.approx(0.0)
    # The first step's reads have nothing to hide behind.
    overlapped = model.forecast([10] * 50, compute_s=0.02, ahead=1)
    assert (overlapped.stall_s, overlapped.total_s) == pytest.approx((0.01, 1.01))
    assert overlapped.hidden == pytest.approx(0.98)
    # Reads that take longer than computation set the pace, wherever they start.
    slow = model.forecast([10] * 50, compute_s=0.004, ahead=1)
    assert slow.total_s == pytest.approx(0.5 + 0.004)
    # A burst hides behind several steps if reads may run that far ahead.
    burst = [0, 0, 0, 0, 60, 0, 0]
    assert model.forecast(burst, compute_s=0.02, ahead=1).stall_s == pytest.approx(0.04)
    assert model.forecast(burst, compute_s=0.02, ahead=3).stall_s == pytest.approx(0.0)
    written = model.forecast([10], compute_s=0.0, ahead=0, written_bytes=10**12)
    assert written.io_s == pytest.approx(0.01 + 0.001)


def test_a_simulation_is_costed() -> None:
    trace = skewed(5_000, 2_000)
    arguments: dict[str, Any] = {"dram": 300 * 64, "row_bytes": 64, "device": "network-block", "batch": 100}
    reactive = simulate(trace, policy="lru", compute_s=0.1, **arguments).forecast
    planned = simulate(trace, compute_s=0.1, **arguments).forecast
    assert reactive is not None
    assert planned is not None
    assert reactive.stall_s == pytest.approx(reactive.io_s)
    assert planned.hidden > 0.9
    dirty = simulate(trace, compute_s=0.1, dirty=True, **arguments).forecast
    assert dirty is not None
    assert dirty.io_s > planned.io_s


def test_every_class_of_devices_is_plausible() -> None:
    for name, model in CostModel.CLASSES.items():
        assert CostModel.of(name) is model
        assert list(model.iops) == sorted(model.iops)
        assert model.latency_s(1) < 0.01
    assert CostModel.of("network-block").batch_s(1_000) > CostModel.of("sata-ssd").batch_s(1_000)
    assert CostModel.of("sata-ssd").batch_s(1_000) > CostModel.of("nvme-gen4").batch_s(1_000)


def test_bad_schedules() -> None:
    model = CostModel.of("sata-ssd")
    for call, words in (
        (lambda: model.batch_s(-5), "reads: .* got -5"),
        (lambda: model.batch_s([1, float("nan")]), "reads: .* got nan"),
        (lambda: model.batch_s(5, read_bytes=-1), "read_bytes: .* got -1"),
        (lambda: model.batch_s(5, depth=0), "depth=0"),
        (lambda: model.latency_s(0), "depth=0"),
        (lambda: model.append_s(-1), "size: .* got -1"),
        (lambda: model.forecast([[1]], compute_s=0, ahead=0), r"reads has shape \[1, 1\]"),
        (lambda: model.forecast([1, 2], compute_s=0, ahead=0, written_bytes=[1]), r"written_bytes has shape \[1\]"),
        (lambda: model.forecast([1], compute_s=-1, ahead=0), "compute_s: .* got -1"),
        (lambda: model.forecast([1], compute_s=0, ahead=-1), "ahead=-1"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match=r"ahead=0\.5"):
        model.forecast([1], compute_s=0, ahead=0.5)  # type: ignore[arg-type]


def test_bad_models() -> None:
    for depths, iops, bandwidth in (
        ((), (), 1.0), ((2, 1), (1.0, 2.0), 1.0), ((1,), (0.0,), 1.0), ((1,), (1.0,), 0.0),
        ((1,), (float("nan"),), 1.0), ((1,), (1.0,), float("inf")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            CostModel("disk", depths, iops, bandwidth)
    with pytest.raises(ValueError, match="or the JSON of a probe"):
        CostModel.of(json.dumps({"format": "other"}))

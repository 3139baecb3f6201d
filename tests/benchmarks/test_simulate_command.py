"""``memhier simulate`` and the traces it reads: every format, its output, and its errors."""

import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memhier.benchmarks.cli.curve_plot import draw_curves
from memhier.benchmarks.cli.main import main
from memhier.benchmarks.cli.traces import TRACE_FORMATS, guess_format, read_blocks, read_trace
from memhier.errors import FormatError
from memhier.planning.curves import miss_ratio_curve
from memhier.planning.simulation import SIMULATED_POLICIES, simulate

KEYS = np.array([5, 0, 5, 2**31 - 1, 7, 5, 1], np.int64)


def npy(keys: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, keys)
    return buffer.getvalue()


def oracle(keys: Any) -> bytes:
    records = np.zeros(len(keys), [("time", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next", "<i8")])
    records["key"] = keys
    return records.tobytes()


ENCODED: dict[str, Callable[[Any], bytes]] = {
    "text": lambda keys: "\n".join(map(str, keys)).encode() + b"\n",
    "npy": npy,
    "int32-be": lambda keys: np.asarray(keys, ">i4").tobytes(),
    "int64-be": lambda keys: np.asarray(keys, ">i8").tobytes(),
    "uint32-le": lambda keys: np.asarray(keys, "<u4").tobytes(),
    "adapt-size": lambda keys: "".join(f"{time} {key} 100\n" for time, key in enumerate(keys)).encode(),
    "oracle-general": oracle,
}


@pytest.mark.parametrize("trace_format", TRACE_FORMATS)
@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
def test_every_format_reads_back(tmp_path: Path, trace_format: str, suffix: str) -> None:
    pack = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}[suffix]
    for keys in (KEYS, KEYS[:1], np.arange(1_100_003) if trace_format == "int32-be" else KEYS):
        path = tmp_path / f"trace{suffix}"
        path.write_bytes(pack(ENCODED[trace_format](keys)))
        assert np.array_equal(read_trace(path, trace_format), keys)
        if trace_format in ("text", "npy", "adapt-size"):
            assert guess_format(path) == trace_format


def test_empty_traces_and_marks(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_bytes(b"")
    assert read_trace(path).tolist() == []
    path.write_bytes(b"3\n*\n\n 4\n*\n")
    assert read_trace(path).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("trace_format", "content"),
    [
        ("int32-be", b"12345"),
        ("oracle-general", bytes(23)),
        ("text", b"1\ntwo\n"),
        ("text", b"1 2\n3 4\n"),
        ("adapt-size", b"1 2 3\n4 5\n"),
        ("npy", b"not an array"),
        ("npy", npy(np.zeros((2, 2), int))),
        ("npy", npy(np.array([0.5]))),
        ("npy", npy(KEYS)[:-3]),
    ],
)
def test_broken_content(tmp_path: Path, trace_format: str, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=f"trace: not a trace in the format '{trace_format}'"):
        read_trace(path, trace_format)


def test_broken_compression_and_unknown_content(tmp_path: Path) -> None:
    for suffix, pack in ((".xz", lzma.compress), (".gz", gzip.compress)):
        path = tmp_path / f"trace{suffix}"
        path.write_bytes(pack(ENCODED["int64-be"](np.arange(10_000)))[:-9])
        with pytest.raises(FormatError):
            read_trace(path, "int64-be")
        path.write_bytes(b"plain")
        with pytest.raises(FormatError, match="cannot be decompressed"):
            read_trace(path)
    path = tmp_path / "trace.bin"
    path.write_bytes(bytes(range(64)))
    with pytest.raises(FormatError, match="no format recognised; name it"):
        read_trace(path)
    with pytest.raises(ValueError, match="trace_format='csv': expected one of text"):
        read_trace(path, "csv")
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nothing")


def test_published_traces_are_recognised(data: Callable[[str], Path]) -> None:
    lengths = {}
    for path in sorted(data("cache-traces").glob("*.[tb][ri]*")):
        first = next(read_blocks(path))
        lengths[path.name] = len(first)
        assert len(np.unique(first)) < len(first)
    assert len(lengths) == 10
    blocks = next(read_blocks(data("cache-traces") / "cloud_physics_w106.trace.xz"))
    assert blocks.max() < 1_197_770  # read from the wrong end they fill all 32 bits
    assert lengths["lirs_multi3.trace.gz"] == 30_241
    assert lengths["cloudPhysicsIO.oracleGeneral.bin.xz"] == 113_872


# The command


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.npy"
    np.save(path, (3_000 * np.random.default_rng(0).random(20_000) ** 3).astype(np.int64))
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


def test_the_table_says_what_the_simulator_says(trace: Path) -> None:
    result = call(trace, "--dram", "64KiB", "--policy", "belady, lru,lfu,s3fifo,static", "--device", "sata-ssd")
    assert result.exit_code == 0, result.output
    for policy in SIMULATED_POLICIES:
        expected = simulate(np.load(trace), dram="64KiB", row_bytes=256, policy=policy)
        (line,) = (line for line in result.output.splitlines() if line.startswith(f"│ {policy} "))
        assert f"{expected.hit_ratio:.2%}" in line
        assert f"{expected.reads:,}" in line
    assert "64KiB of DRAM hold 256 rows" in " ".join(result.output.split())
    assert "B belady  L lru  F lfu  S s3fifo  ┊ 64.0 KiB" in result.output


def test_json_and_png(trace: Path, tmp_path: Path) -> None:
    png, output = tmp_path / "curve.png", tmp_path / "result.json"
    arguments = [trace, "--dram", "64KiB", "--device", "nvme-gen4", "--batch", 16, "--dirty", "--compute-ms", 1]
    assert call(*arguments, "--json", output, "--png", png).exit_code == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    record = json.loads(output.read_text())
    assert record == json.loads(call(*arguments, "--json", "-").output)
    expected = simulate(np.load(trace), dram="64KiB", row_bytes=256, policy="lru", batch=16, dirty=True)
    lru = record["results"][1]
    assert (lru["policy"], lru["reads"], lru["writes"]) == ("lru", expected.reads, expected.writes)
    assert lru["forecast"]["stall_s"] > record["results"][0]["forecast"]["stall_s"]
    curve = miss_ratio_curve(np.load(trace), record["curves"][1]["capacities"])
    assert record["curves"][1]["miss_ratio"] == curve.miss_ratio.tolist()


def test_a_sampled_curve_states_its_error(trace: Path, tmp_path: Path) -> None:
    arguments = [trace, "--dram", "64KiB", "--policy", "lru,lfu", "--sample", 0.2]
    result = call(*arguments, "--png", tmp_path / "curve.png")
    assert "a sample of 20.00% of the keys): within 0." in " ".join(result.output.split())
    assert "L lru  ┊" in result.output
    curves = json.loads(call(*arguments, "--json", "-").output)["curves"]
    assert [curve["policy"] for curve in curves] == ["lru"]
    assert curves[0]["error"][0] is None


def test_a_measured_profile_is_a_device(trace: Path, tmp_path: Path) -> None:
    profile = tmp_path / "disk.json"
    probed = CliRunner().invoke(
        main, ["probe", str(tmp_path), "--size", "16MiB", "--seconds", "0.1", "--json", str(profile)]
    )
    assert probed.exit_code == 0, probed.output
    result = call(trace, "--dram", "64KiB", "--device", profile)
    assert result.exit_code == 0, result.output
    assert "stall s" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dram", "64KiB", "--policy", "mru"], "'mru' is not one of 'belady'"),
        (["--dram", "lots"], "--dram='lots'"),
        (["--dram", "64KiB", "--device", "tape"], "device: expected one of sata-ssd"),
        (["--dram", "1KiB", "--batch", "500"], "would be enough"),
        (["--dram", "64KiB", "--sample", "2"], "rate=2.0"),
        (["--dram", "64KiB", "--format", "text"], "not a trace in the format 'text'"),
        (["--dram", "64KiB", "--lookahead", "-1"], "--lookahead"),
        ([], "Missing option '--dram'"),
    ],
)
def test_wrong_arguments(trace: Path, arguments: list[str], words: str) -> None:
    result = call(trace, *arguments)
    assert result.exit_code != 0
    assert words in result.output
    assert "Traceback" not in result.output


def test_an_empty_trace(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    result = call(path, "--dram", "64KiB")
    assert result.exit_code == 1
    assert "the trace holds no accesses" in result.output


def test_a_picture_without_matplotlib(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = call(trace, "--dram", "64KiB", "--png", tmp_path / "curve.png")
    assert result.exit_code == 1
    assert "pip install 'memhier[plots]'" in result.output


def test_curves_are_drawn_in_place() -> None:
    """A loop of 100 rows under LRU misses always below 100 rows and hardly ever from there on."""
    curve = miss_ratio_curve(np.arange(100_000) % 100, [1, 99, 100, 10_000])
    lines = draw_curves([curve], 4096, 10_000 * 4096).splitlines()
    top, bottom = lines[0][6:], lines[13][6:]
    assert top.rstrip(" ┊") == "L" * len(top.rstrip(" ┊"))
    assert 30 <= len(top.rstrip(" ┊")) <= 40
    assert bottom.endswith("L")
    assert bottom.strip() == "L" * len(bottom.strip())
    assert "4.0 KiB" in lines[15]
    assert "39.1 MiB" in lines[15]

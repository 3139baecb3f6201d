"""``memhier plan``: figures, assumptions, and questions that do not fit together."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memhier.benchmarks.cli.main import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def figures(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["assumptions"]
    return found


def test_tables_of_a_trillion_rows() -> None:
    found = figures("--rows", "1e12", "--row-bytes", 128, "--batch", 65536, "--price-node-hour", 2)
    assert found["workload"]["rows"] == 10**12
    assert found["figures"]["price_an_hour"] == 2 * found["figures"]["nodes"]
    text = run("--rows", "1e12", "--row-bytes", 128).output
    assert "Assumptions:" in text
    assert "1,000,000,000,000 rows" in text


def test_ids_of_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 5000, 20_000))
    found = figures("--rows", 5000, "--sample", tmp_path / "ids.npy")
    assert "fitted to 20,000 ids" in found["assumptions"][0]


def test_a_replay_buffer() -> None:
    found = figures("--samples", "1_000_000", "--batch", 64, "--add-rate", 10)
    assert found["figures"]["nodes"] == 1
    assert found["figures"]["reads"] == 32


@pytest.mark.long
def test_an_index_of_a_file_of_vectors(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).integers(0, 99, (2400, 16)).astype("uint8")
    np.save(tmp_path / "v.npy", vectors)
    found = figures(
        "--vectors", "3e6", "--sample", tmp_path / "v.npy", "--sample-rows", 2048, "--qps", 50, "--price-node-hour", 1,
        "--node", "8 cores, 4 GiB, NVMe 400k IOPS",
    )["figures"]  # fmt: skip
    assert found["nodes"] == found["shards"] * found["replicas"]
    assert found["reads"] == 0  # DRAM holds all pages
    assert found["dram_bytes"] < 4 << 30
    assert found["cost_per_million_queries"] == pytest.approx(found["nodes"] / (50 * 3600) * 1e6)
    for name, value in (("--dim", 5), ("--dtype", "float32")):
        result = run("--vectors", 10, "--sample", tmp_path / "v.npy", name, value)
        assert (result.exit_code, name in result.stderr) == (2, True)


def test_a_probe_of_the_drive(tmp_path: Path) -> None:
    probed = CliRunner().invoke(
        main, ["probe", str(tmp_path), "--size", "8MiB", "--seconds", "0.1", "--json", str(tmp_path / "probe.json")]
    )
    assert probed.exit_code == 0, probed.output
    found = figures("--samples", 1000, "--device", tmp_path / "probe.json")
    profile = json.loads((tmp_path / "probe.json").read_text())
    assert found["node"]["drive_iops"] == max(row["iops"] for row in profile["depths"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected one of --vectors, --rows and --samples"),
        (["--rows", "1e3", "--samples", "5"], "expected one of --vectors, --rows and --samples"),
        (["--rows", "1.5"], "expected a whole number"),
        (["--rows", "-3"], "expected a whole number"),
        (["--rows", "inf"], "expected a whole number"),
        (["--rows", "nan"], "expected a whole number"),
        (["--rows", "5", "--qps", "3"], "--qps does not go with --rows"),
        (["--samples", "5", "--sample-rows", "4096"], "--sample-rows does not go with --samples"),
        (["--vectors", "5"], "expected --dim, or --sample"),
        (["--vectors", "5", "--dim", "8", "--recall", "1"], "--recall"),
        (["--rows", "5", "--node", "a big one"], "node='a big one'"),
    ],
)
def test_a_wrong_question_ends_with_2_and_a_line(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output

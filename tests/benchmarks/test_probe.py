"""``memhier probe``: its table, its JSON and its words when something is wrong."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memhier.benchmarks.cli.main import main
from memhier.benchmarks.cli.probe import show
from memhier.benchmarks.cli.shell import Terminal
from memhier.io.device import DepthProfile, DeviceProfile

QUICK = ["--size", "8MiB", "--seconds", "0.05"]
PROFILE = DeviceProfile(
    path="/mnt/[ssd]", file_system="ext4", device="/dev/sda", kernel="Linux 6.1", date="2026-01-01T00:00:00+00:00",
    engine="uring", direct=True, page_bytes=4096, span_bytes=1 << 30, seed=0, sequential_mb_per_s=2345.6,
    depths=(DepthProfile(1, 12345.6, 50.6, 80.2, 131.0, 5), DepthProfile(128, 98765.0, 404.5, 1290.0, 2500.0, 9)),
    notes=("the [sky] is clouded",),
)  # fmt: skip


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["probe", *arguments])


def test_a_table_of_every_depth_and_json_in_a_file(tmp_path: Path) -> None:
    folder, file = tmp_path / "device", tmp_path / "profile.json"
    folder.mkdir()
    result = run(str(folder), "--json", str(file), *QUICK)
    assert result.exit_code == 0, result.output
    profile = DeviceProfile.from_json(file.read_text())
    assert [row.depth for row in profile.depths] == [1, 2, 4, 8, 16, 32, 64, 128]
    for row in profile.depths:
        assert f"{row.iops:,.0f}" in result.stdout
    assert profile.engine in result.stdout
    assert list(folder.iterdir()) == []


def test_json_alone_on_standard_output(tmp_path: Path) -> None:
    result = run(str(tmp_path), "--json", "-", "--seed", "5", *QUICK)
    assert result.exit_code == 0, result.output
    assert DeviceProfile.from_json(result.stdout).seed == 5


def test_the_table_shows_figures_machine_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    show(PROFILE, Terminal())
    show(replace(PROFILE, direct=False), Terminal())
    text = capsys.readouterr().out
    for part in ("/mnt/[ssd]", "12,346", "50.6", "131", "98,765", "2,346 MB/s", "ext4 on /dev/sda", "[sky]"):
        assert part in text, text
    assert "direct I/O" in text
    assert "buffered" in text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--size", "900TiB"], 1, "pass a smaller size"),
        (["--size", "lots"], 2, "size='lots'"),
        (["--size", "64KiB"], 2, "expected at least"),
        (["--seconds", "-1"], 2, "seconds=-1.0"),
        (["--seed", "-1"], 2, "seed=-1"),
        (["--json", "/nowhere/at/all.json"], 2, "/nowhere/at"),
    ],
)
def test_errors_in_plain_words(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    result = run(str(tmp_path), *arguments)
    assert result.exit_code == code
    assert result.stderr.startswith("Error: ")
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_missing_path_and_a_folder_for_json_are_usage_errors(tmp_path: Path) -> None:
    for arguments in ([str(tmp_path / "none")], [str(tmp_path), "--json", str(tmp_path)]):
        result = run(*arguments)
        assert result.exit_code == 2
        assert str(tmp_path) in result.stderr


def test_the_handler_for_termination_is_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run(str(tmp_path), "--json", "-", *QUICK).exit_code == 0
    assert signal.getsignal(signal.SIGTERM) is before

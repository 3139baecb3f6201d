"""How every command ends: exit codes, Ctrl-C, closed pipes, ASCII terminals, narrow and missing ones, completion."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner

from memhier.ann import ZoomIndex
from memhier.ann.files import write_vectors
from memhier.benchmarks.cli.main import COMMANDS, main
from memhier.recsys import CarouselBuffer

MEMHIER = (sys.executable, "-c", "from memhier.benchmarks.cli.main import main; main(prog_name='memhier')")
VECTORS = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
LONG = "a name that is too long for a line of eighty columns, " * 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an index whose documents are not ASCII, a replay buffer, files of vectors, and other files."""
    folder = tmp_path_factory.mktemp("manners")
    write_vectors(folder / "x.fvecs", VECTORS)
    documents = {"title": [f"Straße {row} {LONG}" for row in range(len(VECTORS))]}
    ZoomIndex.build(folder / "index", VECTORS, documents=documents, dram="2MiB").close()
    with CarouselBuffer(folder / "buffer", memory=4, schema={"x": ("float32", 2)}, seed=0) as buffer:
        buffer.add({"x": np.zeros((8, 2), np.float32)}, labels=np.zeros(8, int))
        buffer.checkpoint()
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("no numbers\n")
    (folder / "keys.txt").write_text("1\n2\n1\n")
    return folder


def run(*arguments: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*MEMHIER, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of every command."""
    context, found = click.Context(group), []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        found += leaves(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]
    return found


FAILURES: dict[tuple[str, ...], list[object]] = {
    ("demo",): ["--dir", "text.txt/below"],
    ("probe",): [".", "--size", "900TiB"],
    ("plan",): ["--samples", "5", "--device", "text.txt"],
    ("simulate",): ["text.txt", "--dram", "1MiB", "--format", "text"],
    ("bench", "list"): [],
    ("bench", "run"): ["tiers-policies", "--work", "text.txt/below"],
    ("bench", "compare"): ["text.txt", "text.txt"],
    ("bench", "report"): ["text.txt"],
    ("bench", "install"): ["search", "--peer", "faiss_refine", "--envs", "text.txt/below"],
    ("bench", "papers"): ["text.txt"],
    ("replay", "info"): ["empty"],
    ("replay", "check"): ["empty"],
    ("replay", "export"): ["buffer", "empty"],
    ("replay", "doctor"): ["empty", "--step-ms", "3"],
    ("index", "build"): ["index", "x.fvecs"],
    ("index", "search"): ["empty", "x.fvecs"],
    ("index", "info"): ["empty"],
    ("index", "check"): ["empty"],
    ("index", "add"): ["empty", "x.fvecs"],
    ("index", "remove"): ["empty", "keys.txt"],
    ("index", "update"): ["empty", "--where", "n < 1", "--set", "{}"],
    ("index", "tune"): ["empty", "x.fvecs"],
    ("index", "compact"): ["empty"],
    ("index", "export"): ["index", "x.fvecs"],
    ("index", "ids"): ["empty"],
    ("index", "push"): ["empty", "memory://manners"],
    ("index", "pull"): ["memory://manners", "new"],
    ("index", "backups"): ["memory://manners"],
    ("index", "prune"): ["memory://manners", "--keep", "1"],
    ("serve",): ["empty"],
    ("doctor",): ["/proc", "--seconds", "0"],
}


def test_the_table_of_failures_has_every_command() -> None:
    assert set(FAILURES) == set(leaves(main))


@pytest.mark.parametrize("words", FAILURES, ids=" ".join)
def test_a_wrong_option_ends_with_2_and_a_failure_with_1(
    words: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    before = sorted(os.listdir(place))
    for arguments, code in ((["--no-such-option"], 2), (FAILURES[words], 1)):
        if not arguments:  # nothing that this command is asked for can fail
            continue
        result = CliRunner().invoke(main, [*words, *map(str, arguments)])
        assert result.exit_code == code, result.output
        assert isinstance(result.exception, SystemExit)
        assert result.stderr.splitlines()[-1].startswith("Error: ")
        assert "Traceback" not in result.output
    assert sorted(os.listdir(place)) == before


# Arguments with which a command would run; wrong values of each option are tried beside them.
RUNS: dict[tuple[str, ...], list[str]] = {
    ("demo",): [],
    ("probe",): ["."],
    ("simulate",): ["keys.txt", "--dram", "1MiB"],
    ("bench", "list"): [],
    ("bench", "run"): ["tiers-policies"],
    ("bench", "compare"): ["text.txt", "text.txt"],
    ("bench", "report"): ["text.txt"],
    ("bench", "install"): ["search"],
    ("bench", "papers"): ["text.txt"],
    ("replay", "info"): ["buffer"],
    ("replay", "check"): ["buffer"],
    ("replay", "export"): ["buffer", "out"],
    ("replay", "doctor"): ["buffer", "--step-ms", "3"],
    ("index", "build"): ["new", "x.fvecs"],
    ("index", "search"): ["index", "x.fvecs"],
    ("index", "info"): ["index"],
    ("index", "check"): ["index"],
    ("index", "add"): ["index", "x.fvecs"],
    ("index", "remove"): ["index", "keys.txt"],
    ("index", "update"): ["index", "--where", "n < 1", "--set", "{}"],
    ("index", "tune"): ["index", "x.fvecs"],
    ("index", "compact"): ["index"],
    ("index", "export"): ["index", "out.npz"],
    ("index", "ids"): ["index"],
    ("index", "push"): ["index", "memory://wrong"],
    ("index", "pull"): ["memory://wrong", "new"],
    ("index", "backups"): ["memory://wrong"],
    ("index", "prune"): ["memory://wrong", "--keep", "1"],
    ("plan",): ["--rows", "1000", "--row-bytes", "64", "--batch", "16"],
    ("serve",): ["index"],
    ("doctor",): ["."],
}


def wrong_values(kind: click.ParamType) -> list[str]:
    """Return values that an option or an argument of this type does not take."""
    if isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        outside = ["nan", "inf", "-inf"] if isinstance(kind, click.types.FloatParamType) else []
        outside += ["-99999999999"] if isinstance(kind, click.IntRange) and kind.min is not None else []
        return ["", "x", "1 2", "0x", *outside]
    if isinstance(kind, click.Choice):
        return ["", "x", "L2 ", "\x1b[31m"]
    if isinstance(kind, click.Path):
        return ["none/none/none", "\x00", "a" * 5000, "none\udcff/x"]
    return []


def wrong_calls() -> Iterator[tuple[tuple[str, ...], list[str]]]:
    for words, usual in RUNS.items():
        command: click.Command = main
        for word in words:
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(main), word)
            assert found is not None
            command = found
        yield words, [*usual, *(["x"] * 9 if not any(p.nargs == -1 for p in command.params) else ["--x"])]
        required = [each for each in command.params if isinstance(each, click.Argument) and each.required]
        yield from ((words, usual[:count]) for count in range(len(required)))
        for option in command.params:
            if not isinstance(option, click.Option):
                continue
            name = option.opts[0]
            yield words, [*usual, f"{name}=yes", "--x"] if option.is_flag else [*usual, name]
            exists = not isinstance(option.type, click.Path) or option.type.exists
            yield from ((words, [*usual, name, value]) for value in wrong_values(option.type) if exists)


def test_wrong_values_are_tried_on_every_command() -> None:
    assert set(RUNS) == set(leaves(main))
    assert len([*wrong_calls()]) > 300


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_no_wrong_value_of_an_option_gives_a_traceback(
    words: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    before = sorted(os.listdir(place))
    for tried, arguments in wrong_calls():
        if tried != words:
            continue
        result = CliRunner().invoke(main, [*words, *arguments])
        assert isinstance(result.exception, SystemExit), (arguments, result.exception)
        assert result.exit_code == 2, (arguments, result.output)
        assert result.stderr.startswith("Error: "), (arguments, result.stderr)
        assert result.stderr.count("\n") == 1, (arguments, result.stderr)
        assert sorted(os.listdir(place)) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "keys.txt", "--dram", "1MiB", "--policy", "lru,mru"],
        ["simulate", "keys.txt", "--dram", "lots"],
        ["bench", "run", "--group", "x"],
        ["bench", "list", "x"],
        ["index", "search", "index", "x.fvecs", "--max-reads", "0"],
        ["index", "search", "index", "x.fvecs", "--deadline-ms", "0"],
        ["index", "search", "index", "x.fvecs", "--fields", "author"],
        ["index", "build", "new", "x.fvecs", "--metric", "l3"],
        ["index", "export", "index", "new.csv"],
        ["index", "export", "index", "new.npy", "--fields", "title"],
        ["index", "export", "index", "new.bvecs"],
        ["doctor", "nowhere"],
        ["doctor", "--seconds", "-1"],
    ],
)
def test_a_wrong_value_ends_with_2_and_a_line(
    arguments: list[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_an_index_that_another_process_writes_is_told(place: Path) -> None:
    with ZoomIndex.open(place / "index", writable=True):
        for words in (["add", "index", "x.fvecs"], ["tune", "index", "x.fvecs"], ["compact", "index"]):
            told = run("index", *words, folder=place)
            assert told.returncode == 1
            assert f"process {os.getpid()} has it open for writing" in told.stderr
        assert run("index", "search", "index", "x.fvecs", folder=place).returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_without_a_traceback_and_leaves_nothing(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    # A program that was started in the background ignores SIGINT: the child takes it again.
    code_of_child = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {MEMHIER[2]}"
    command = [sys.executable, "-c", code_of_child, "probe", str(tmp_path), "--size", "16MiB", "--seconds", "600"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not any(tmp_path.iterdir()) and child.poll() is None:
            time.sleep(0.01)
        child.send_signal(number)
        stdout, stderr = child.communicate()
    finally:
        child.kill()
    assert child.returncode == code, stderr
    assert "Traceback" not in stderr
    assert stdout == ""
    assert [*tmp_path.iterdir()] == []


@pytest.mark.long
def test_a_pipe_that_closes_ends_a_command_without_words(place: Path) -> None:
    """The reader is gone before the first line; then it reads a line, and there is more than a pipe holds."""
    for arguments, read in (
        (["index", "info", "index"], False),
        (["--help"], False),
        (["index", "search", "index", "x.fvecs", "--show", "300", "-k", "50", "--fields", "all"], True),
        (["index", "search", "index", "x.fvecs", "--show", "300", "-k", "50", "--fields", "all", "--json", "-"], True),
    ):
        child = subprocess.Popen(
            [*MEMHIER, *arguments],
            cwd=place,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stderr is not None
        if read:
            child.stdout.readline()
        child.stdout.close()
        told = child.stderr.read()
        child.stderr.close()
        assert (child.wait(), told) == (141, ""), arguments


def test_terminals_without_unicode_get_plain_letters(place: Path) -> None:
    for arguments in (
        ["index", "search", "index", "x.fvecs", "--show", "1", "-k", "1", "--fields", "all"],
        ["index", "info", "index"],
        ["replay", "info", "buffer"],
        ["simulate", "keys.txt", "--dram", "1KiB"],
        ["bench", "papers"],
        ["doctor", ".", "--seconds", "0"],
    ):
        plain = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "TERM": "dumb", "NO_COLOR": "1", "PYTHONUTF8": "0"}
        done = subprocess.run(
            [*MEMHIER, *arguments], cwd=place, env={**os.environ, **plain}, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == b""
        assert done.stdout.isascii()
        assert b"\\u25" not in done.stdout  # lines of boxes and pictures
        assert b"\x1b" not in done.stdout


def test_a_file_or_a_pipe_gets_whole_lines_whatever_columns_says(place: Path) -> None:
    with ZoomIndex.open(place / "index") as index:
        (title,) = index.fetch([7])["title"]
    np.save(place / "q.npy", VECTORS[7:8])
    for columns in ("40", "200"):
        told = run("index", "search", "index", "q.npy", "-k", 1, "--fields", "title", folder=place, COLUMNS=columns)
        assert title in told.stdout, told.stderr
        told = run("bench", "papers", folder=place, COLUMNS=columns)
        assert "…" not in told.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_is_no_error(place: Path, closed: str) -> None:
    words = shlex.join([*MEMHIER, "index", "search", "index", "x.fvecs", "-k", "1"])
    done = subprocess.run(f"{words} {closed}", shell=True, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_tab_takes_the_room_that_it_is_printed_in(tmp_path: Path) -> None:
    titles = [f"{'x' * row}\tend\t" for row in range(1, 9)]
    ZoomIndex.build(tmp_path / "tabs", VECTORS[:8], dram="2MiB", documents=[{"title": each} for each in titles]).close()
    np.save(tmp_path / "q.npy", VECTORS[:1])
    told = run("index", "search", "tabs", "q.npy", "-k", 8, "--fields", "title", folder=tmp_path)
    rows = [line for line in told.stdout.splitlines() if line.count("│") == 5]
    assert len(rows) == 8, told.stdout + told.stderr
    assert len({len(line) for line in rows}) == 1
    assert {line.split("│")[4].strip() for line in rows} == {each.expandtabs().strip() for each in titles}


def test_a_narrow_terminal_folds_lines_and_cuts_none(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for name, value in (("TTY_COMPATIBLE", "1"), ("TERM", "xterm"), ("COLUMNS", "40")):
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(
        main, ["index", "search", "index", "x.fvecs", "-k", "1", "--show", "1", "--fields", "all"]
    )
    assert result.exit_code == 0, result.output
    lines = click.unstyle(result.stdout).splitlines()
    assert "…" not in result.stdout
    assert max(map(len, lines)) == 40
    cells = "".join(line.split("│")[-2].strip() for line in lines if line.count("│") == 5)
    assert LONG.replace(" ", "") in cells.replace(" ", "")


def test_tables_leave_out_zero_and_none_and_json_has_them(place: Path) -> None:
    invoke = CliRunner().invoke
    figures: dict[str, Any] = json.loads(invoke(main, ["index", "info", str(place / "index"), "--json", "-"]).stdout)
    table = invoke(main, ["index", "info", str(place / "index")]).stdout
    shown = {line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│")}
    assert {name for name, value in figures.items() if value == 0 or value is None} >= {"candidates", "reads"}
    assert shown == {
        name.replace("_", " ") for name, value in figures.items() if value not in (None, 0) or value is False
    }


def test_bash_completes_commands_options_and_names() -> None:
    def completed(*words: str) -> list[str]:
        text = " ".join(["memhier", *words])
        environment = {"_MEMHIER_COMPLETE": "bash_complete", "COMP_WORDS": text, "COMP_CWORD": str(len(words))}
        done = run(folder=Path.cwd(), **environment)
        assert done.returncode == 0, done.stderr
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert completed("") == [*COMMANDS]
    assert completed("in") == ["index"]
    assert set(completed("index", "")) >= {"build", "search", "tune", "export"}
    assert "--max-reads" in completed("index", "search", "--")
    assert completed("index", "build", "new", "x", "--metric", "c") == ["cosine"]
    assert completed("bench", "run", "--group", "t") == ["tiers"]
    shell = get_completion_class("bash")
    assert shell is not None
    script = run(folder=Path.cwd(), _MEMHIER_COMPLETE="bash_source").stdout
    assert "complete -o nosort -F _memhier_completion memhier" in script


def test_completion_imports_no_command_for_the_list_of_commands() -> None:
    code = (
        "import sys\n"
        "try: from memhier.benchmarks.cli.main import main; main(prog_name='memhier')\n"
        "except SystemExit: assert not {'faiss', 'rich', 'numpy'} & set(sys.modules)\n"
    )
    environment = {"_MEMHIER_COMPLETE": "bash_complete", "COMP_WORDS": "memhier ", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr

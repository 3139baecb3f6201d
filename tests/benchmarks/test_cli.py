"""The ``memhier`` command: its help, its manners and its few imports."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from memhier.benchmarks.cli.main import COMMANDS, main


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name, (_, line) in COMMANDS.items():
        assert f"{name} " in result.output
        assert line in result.output


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: main {name}")
    # The results of bench are JSON lines, always; a server has none.
    assert name in ("bench", "serve") or "--json" in result.output


def test_help_imports_no_command() -> None:
    code = (
        "import sys, click\n"
        "from memhier.benchmarks.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'faiss', 'rich', 'lmdb', 'matplotlib', 'tqdm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr


RUN = (
    "try: from memhier.benchmarks.cli.main import main; main(sys.argv[1:])\nexcept SystemExit as end: code = end.code\n"
)


def run_apart(code: str, *arguments: str) -> str:
    """Run code in a fresh process; return its output."""
    command = [sys.executable, "-c", f"import sys\n{code}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench"])
def test_no_command_of_the_product_loads_an_experiment(name: str) -> None:
    check = (
        "rooms = {module.split('.')[2] for module in sys.modules if module.startswith('memhier.benchmarks.')}\n"
        "assert 'cli' in rooms\n"
        "assert not rooms & {'bench', 'workloads', 'peers', 'suites', 'decode', 'models', 'datasets'}, rooms\n"
    )
    assert "Usage:" in run_apart(f"{RUN}assert code == 0\n{check}", name, "--help")


@pytest.mark.parametrize(
    ("missing", "arguments", "words"),
    [
        ("click", ["--help"], "memhier: the command needs click: pip install 'memhier[cli]'"),
        ("rich", ["probe", "--help"], "memhier probe needs rich: pip install 'memhier[cli]'"),
        ("tqdm", ["replay", "--help"], "memhier replay needs tqdm: pip install 'memhier[cli]'"),
        ("faiss", ["demo", "--help"], "pip install 'memhier[search]'"),
    ],
)
def test_a_missing_package_is_an_error_that_names_the_extra(missing: str, arguments: list[str], words: str) -> None:
    block = (
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {missing!r}: raise ModuleNotFoundError(name, name={missing!r})\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    told = run_apart(f"{block}{RUN}print(code if isinstance(code, str) else '')\nassert code\n", *arguments)
    assert words in " ".join(told.split())
    assert "Traceback" not in told


def test_an_unknown_command_is_told_the_known_ones() -> None:
    result = CliRunner().invoke(main, ["demonstrate"])
    assert result.exit_code == 2
    assert "there is no command 'demonstrate': expected one of demo, probe" in result.output


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert "version" in result.output

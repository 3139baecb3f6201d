"""What is shipped: the wheel's files, a plain install outside the checkout, and the build that needs no compiler.

The quick tests build the wheel without the compiled core, which takes a second; the slow one goes the whole way from
source archive to compiled wheel.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOMES = {
    "memhier": "memhier", "ann": "memhier/ann", "recsys": "memhier/recsys", "benchmarks": "memhier/benchmarks",
    "memhier/native/memhier_native": "memhier_native",
}  # fmt: skip

pytest.importorskip("scikit_build_core", reason="building needs scikit-build-core; 'make build' installs it")


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """Run a command in `folder`, without the environment variables of this library; return what it said."""
    hidden = ("MEMHIER_", "PYTHONPATH", "PYTEST_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder, env={**clean, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(source: Path, folder: Path, *settings: str) -> Path:
    """Build a wheel as ``pip wheel`` does, with the build tools that are installed and nothing from the network."""
    options = [f"--config-settings={setting}" for setting in (f"build-dir={folder / 'cmake'}", *settings)]
    command = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", *options)
    run(*command, "-w", folder, source, folder=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def build_sdist(folder: Path) -> Path:
    code = f"import scikit_build_core.build as build; build.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", code, folder=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment with this one's libraries, but not its memhier; return its python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
        folder=folder,
    )
    (site,) = folder.glob("lib/python*/site-packages")
    # A path named in a .pth comes after this folder, and its own .pth files (an editable memhier's) are not run.
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"])
    return python


def expected_files() -> set[str]:
    """Return what a wheel without the compiled core must hold, from the sources themselves."""
    names = set()
    for folder, home in HOMES.items():
        for file in (ROOT / folder).rglob("*"):
            inside = file.relative_to(ROOT / folder)
            if (
                file.suffix in {".py", ".pyi", ".typed", ".toml", ".jsonl", ".yml", ".yaml"}
                and file.resolve() == file
                and inside.parts[0] != "native"
            ):
                names.add(f"{home}/{inside}")
    return names


def files_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if ".dist-info/" not in name]


@pytest.fixture(scope="module")
def python_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel built as where there is no compiler."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("python-wheel"), "wheel.cmake=false")


@pytest.fixture(scope="module")
def installed(python_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the python of an environment with that wheel."""
    return install(python_wheel, tmp_path_factory.mktemp("plain") / "env")


def test_the_wheel_holds_every_module_once_and_nothing_else(python_wheel: Path) -> None:
    names = files_in(python_wheel)
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert set(names) == expected_files()
    assert "memhier/ann/__init__.py" in names


def test_without_a_compiler_the_wheel_is_for_any_machine(python_wheel: Path) -> None:
    assert python_wheel.name.endswith("-py3-none-any.whl")


def test_a_build_without_a_compiler_asks_for_none(tmp_path: Path) -> None:
    script = tmp_path / "fail"
    script.write_text("#!/bin/sh\necho a compiler was called >&2\nexit 1\n")
    script.chmod(0o755)
    for tool in ("cmake", "ninja", "make", "c++", "g++", "cc", "gcc"):
        (tmp_path / tool).symlink_to(script)
    code = (
        "import scikit_build_core.build as build\n"
        "settings = {'wheel.cmake': 'false'}\n"
        "print('needs', build.get_requires_for_build_wheel(settings))\n"
        f"build.build_wheel({str(tmp_path)!r}, settings)"
    )
    said = run(sys.executable, "-c", code, folder=ROOT, PATH=f"{tmp_path}:{os.environ['PATH']}", CXX=str(script))
    assert "needs []" in said, said
    assert len(list(tmp_path.glob("*.whl"))) == 1


def test_a_plain_install_imports_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = (
        "import memhier, memhier.ann, memhier.recsys, memhier.benchmarks, sys\n"
        "from memhier import backend\n"
        "print(memhier.__file__, memhier.ann.__file__, backend.name)\n"
        "assert not {'ann', 'recsys', 'benchmarks'} & set(sys.modules)"
    )
    first, second, backend = run(installed, "-c", code, folder=tmp_path).split()
    assert first.startswith(str(installed.parents[1])), first
    assert second.startswith(str(installed.parents[1])), second
    assert backend == "python"


def test_a_plain_install_reads_and_has_its_command(installed: Path, tmp_path: Path) -> None:
    assert (installed.parent / "memhier").exists()
    code = (
        "from memhier.io.reader import Reader\n"
        f"file = {str(ROOT / 'LICENSE')!r}\n"
        "with Reader() as reader:\n"
        "    read = reader.read(reader.add(file), [5, 4094], 97)\n"
        "data = open(file, 'rb').read()\n"
        "assert [bytes(row) for row in read] == [data[5:102], data[4094:4191]]\n"
        "print(reader.engine)"
    )
    assert run(installed, "-c", code, folder=tmp_path).strip() == "python"


def test_a_plain_install_in_pure_python_keeps_rows_and_reads_them(installed: Path, tmp_path: Path) -> None:
    assert " python python " in run(installed, ROOT / "tests/installed.py", folder=tmp_path, MEMHIER_NATIVE="0")


def test_insisting_on_the_compiled_core_fails_loudly_without_it(installed: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="MEMHIER_NATIVE=1, but the compiled core cannot be imported"):
        run(installed, "-c", "import memhier.backend", folder=tmp_path, MEMHIER_NATIVE="1")


def test_the_source_archive_has_what_a_build_needs_and_no_build_products(tmp_path: Path) -> None:
    with tarfile.open(build_sdist(tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native = {str(file.relative_to(ROOT)) for file in (ROOT / "memhier/native").rglob("*.[ch]pp")}
    assert native
    assert names >= native | {"pyproject.toml", "LICENSE", "README.md", "memhier/native/CMakeLists.txt"}
    products = (".so", ".pyc", ".whl", ".png")
    assert [name for name in names if name.endswith(products) or name.split("/")[0] in {"build", ".venv", "dist"}] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_from_source_archive_to_compiled_wheel(tmp_path: Path) -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    for folder in ("sdist", "wheel", "elsewhere"):
        (tmp_path / folder).mkdir()
    expected = expected_files()
    wheel = build_wheel(build_sdist(tmp_path / "sdist"), tmp_path / "wheel")
    names = files_in(wheel)
    (core,) = set(names) - expected
    assert core.startswith("memhier_native/_core.")
    assert len(names) == len(expected) + 1

    python = install(wheel, tmp_path / "env")
    imports = "import memhier.ann, memhier.recsys, memhier.benchmarks"
    core_found = "from memhier import backend; assert backend.name == 'native', backend.name"
    run(python, "-c", f"{imports}; {core_found}", folder=tmp_path / "elsewhere")
    # In the checkout, where the folder memhier hides the installed package under "python -m pytest" but not "pytest".
    test = tmp_path / "elsewhere" / "test_core.py"
    test.write_text(f"def test_core():\n    {imports}\n    {core_found}\n    print('from', memhier.__file__)\n")
    options = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--rootdir", test.parent, "-c", os.devnull, test)
    said = run(python, *options, folder=ROOT)
    assert f"from {ROOT / 'memhier'}" in said, said
    said = run(python, "-P", *options, folder=ROOT)  # what the script "pytest" does
    assert f"from {tmp_path / 'env'}" in said, said

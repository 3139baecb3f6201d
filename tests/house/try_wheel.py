"""Try the wheel as a new user would: ``python tests/house/try_wheel.py``, or ``make try-wheel``.

It builds the wheel in isolation, installs it into empty environments outside the checkout, each with only the extras of
the install line above a block, and runs the blocks of README and the tutorials there as printed, twice. No compiler
can be called meanwhile. It also times the way from nothing to a first index with payload. It needs the network.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from documents import ROOT, Block, blocks_of, not_run, run
from requirements import requirements

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]
COMPILERS = ("c++", "cc", "clang", "clang++", "cmake", "g++", "gcc", "make", "ninja")
FIRST_INDEX_SECONDS = 600
# The guides to move from a peer, and the packages of its blocks there.
GUIDES = {
    "from-faiss": ["faiss"],
    "from-other-indexes": ["diskannpy==0.7.0 numpy==1.25.*", "lancedb", "hnswlib", "usearch", "chromadb"],
    "from-torchrec": ["torchrec==1.8.0"],
}
# Packages that replace those that a peer brings: TorchRec asks for FBGEMM with CUDA, in the folder of the one without.
INSTEAD = {"torchrec": ["fbgemm-gpu-cpu==1.8.0"]}


@dataclass(frozen=True)
class Row:
    """A line of the table: something tried, where, how long it took, and the last words of its failure if it failed."""

    tried: str
    where: str
    seconds: float | None
    failure: str | None = None

    def __str__(self) -> str:
        seconds = f"{self.seconds:8.1f}" if self.seconds is not None else f"{'-':>8}"
        return f"{self.tried:34} {self.where:42} {seconds}  {self.failure or 'passed'}"


@dataclass(frozen=True)
class Trial:
    """A wheel to try with an interpreter, in folders below one of its own."""

    interpreter: str
    core: str
    wheel: Path
    folder: Path
    path: str  # of programs, compilers left out

    def where(self, extras: frozenset[str]) -> str:
        version = self.folder.name.split("-")[0]
        return f"{version} {self.core} [{','.join(sorted(extras))}]"

    def environment(self, extras: frozenset[str], *packages: str, cache: bool = True) -> Path:
        """Make an empty environment, install the wheel with extras, or other packages, and return its Python."""
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="env-"))
        call(self.interpreter, "-m", "venv", folder)
        python = folder / "bin/python"
        wheel = f"{self.wheel}[{','.join(sorted(extras))}]" if extras else str(self.wheel)
        # A peer may ask for an older numpy than memhier does: then the block that shows it does not import memhier.
        with_wheel = () if "diskannpy" in " ".join(packages) else ("-c", str(ROOT / "constraints.txt"), wheel)
        options = ("-q", "--disable-pip-version-check", *(() if cache else ("--no-cache-dir",)))
        # memhier needs no compiler; a peer may.
        path = os.environ["PATH"] if packages else self.path
        call(python, "-m", "pip", "install", *options, *with_wheel, *packages, PATH=path)
        return python


def call(*command: str | Path, **environment: str) -> str:
    """Run a command outside the checkout, and return its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MEMHIER_", "PYTHON"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=tempfile.gettempdir(), env={**clean, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"{command} failed")
    return done.stdout


def without_compilers(folder: Path) -> str:
    """Return a search path on which every compiler fails."""
    folder.mkdir()
    failing = folder / "fail"
    failing.write_text("#!/bin/sh\necho 'a compiler was called' >&2\nexit 1\n")
    failing.chmod(0o755)
    for name in COMPILERS:
        (folder / name).symlink_to(failing)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def trial_of(interpreter: str, core: str, folder: Path, path: str, wheel: str | None) -> Trial:
    """Build a wheel in isolation, compiled, or in pure Python without a compiler; or take the one that there is."""
    version = call(interpreter, "-c", "import sys; print(sys.version.split()[0])").strip()
    place = folder / f"{version}-{core}"
    place.mkdir()
    if wheel is not None:
        return Trial(interpreter, core, Path(wheel).resolve(), place, path)
    settings = {
        "compiled": ["wheel.py-api=cp312", f"build-dir={place / 'build'}"],
        "python": ["wheel.cmake=false"],
    }[core]
    options = [f"--config-settings={setting}" for setting in settings]
    tools = {"PATH": path} if core == "python" else {}
    call(interpreter, "-m", "pip", "wheel", "-q", "--no-deps", *options, "-w", place, ROOT, **tools)
    (built,) = place.glob("*.whl")
    return Trial(interpreter, core, built, place, path)


def attempt(tried: str, where: str, block: Block, python: Path, folder: Path, path: str) -> Row:
    """Run a block twice and say how it went."""
    began = time.monotonic()
    try:
        done = run(block, python, folder, PATH=path, HOME=str(folder))
    except subprocess.TimeoutExpired as error:
        return Row(tried, where, time.monotonic() - began, f"FAILED: not done after {error.timeout:g} s")
    words = (done.stderr.strip().splitlines() or ["no words"])[-1]
    return Row(tried, where, time.monotonic() - began, None if done.returncode == 0 else f"FAILED: {words}")


def try_blocks(trial: Trial, left_out: frozenset[str]) -> Iterator[Row]:
    """Run each block in an environment with the extras of the install line above it."""
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language in ("python", "shell")]
    blocks = [block for block in blocks if not_run(block) is None]
    for extras in sorted({block.extras for block in blocks if block.extras is not None}, key=sorted):
        where = trial.where(extras)
        own = [block for block in blocks if block.extras == extras]
        needs = {package.partition(">")[0] for extra in extras for package in requirements(extra)}
        if needs & left_out:
            yield from (Row(str(block), where, None, f"left out: needs {', '.join(needs & left_out)}") for block in own)
            continue
        began = time.monotonic()
        python = trial.environment(extras)
        call(python, ROOT / "tests/installed.py", MEMHIER_NATIVE=str(int(trial.core == "compiled")))
        yield Row("environment, tests/installed.py", where, time.monotonic() - began)
        for number, block in enumerate(own):
            yield attempt(str(block), where, block, python, python.parents[1] / f"run-{number}", trial.path)
        shutil.rmtree(python.parents[1])


def try_first_index(trial: Trial) -> Row:
    """Time the way from nothing to the answer of the README's first block, which stores and returns payload."""
    block = blocks_of(ROOT / "README.md", "python")[0]
    assert block.extras is not None
    began = time.monotonic()
    python = trial.environment(block.extras, cache=False)
    row = attempt(str(block), "", block, python, python.parents[1] / "run", trial.path)
    seconds = time.monotonic() - began
    slow = None if seconds < FIRST_INDEX_SECONDS else f"FAILED: over {FIRST_INDEX_SECONDS} s"
    return Row("first own index with payload", trial.where(block.extras), seconds, row.failure or slow)


def try_guides(trial: Trial) -> Iterator[Row]:
    """Run the blocks of the guides that need a peer, each with the peer in an environment of its own."""
    for page, peers in GUIDES.items():
        for packages in peers:
            name = packages.split("=")[0].split()[0]
            pattern = ("import " + name, "from " + name)
            own = [block for block in blocks_of(ROOT / f"docs/how-to/{page}.md", "python")
                   if any(line.startswith(pattern) for line in block.code.splitlines())]  # fmt: skip
            for block in own:
                extras = block.extras or frozenset()
                python = trial.environment(extras, *(() if name == "faiss" else packages.split()))
                if name in INSTEAD:
                    call(python, "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", *INSTEAD[name])
                where = f"{trial.where(extras)}, {name}"
                yield attempt(str(block), where, block, python, python.parents[1] / "run", trial.path)
                shutil.rmtree(python.parents[1])


def tries(interpreter: str, core: str, folder: Path, path: str, options: argparse.Namespace) -> Iterator[Row]:
    """Build a wheel and try it."""
    began = time.monotonic()
    trial = trial_of(interpreter, core, folder, path, options.wheel)
    yield Row(f"wheel ({core})", trial.wheel.name, time.monotonic() - began)
    if options.guides:
        yield from try_guides(trial)
    else:
        yield try_first_index(trial)
        yield from try_blocks(trial, frozenset(options.without))


def main() -> int:
    """Try each interpreter with each core, print a line for each thing tried, and return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", action="append", help="an interpreter; may be repeated; this one by default")
    parser.add_argument("--core", action="append", choices=("compiled", "python"), help="both by default")
    parser.add_argument("--wheel", help="a wheel to try in place of new ones; name its --core and --python")
    parser.add_argument("--without", action="append", default=[], help="leave out blocks that need this package")
    parser.add_argument("--guides", action="store_true", help="run the guides to move from peers, and nothing else")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="memhier-wheel-") as name:
        path = without_compilers(Path(name) / "no-compilers")
        for interpreter in options.python or [sys.executable]:
            for core in options.core or ("compiled", "python"):
                for row in tries(interpreter, core, Path(name), path, options):
                    print(row, flush=True)
                    rows.append(row)
    failed = [row for row in rows if row.failure is not None and row.failure.startswith("FAILED")]
    print(f"{len(rows) - len(failed)} passed or left out, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

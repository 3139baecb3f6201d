"""Workloads that are programs of their own, run as such; their figures and words are kept."""

import json
import os
import shlex
import subprocess
import tempfile
import time
from pathlib import Path

from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.bench.results import Results
from memhier.benchmarks.bench.workload import Size, Workload
from memhier.benchmarks.peers.process import ONE_THREAD, group_python, last_words

__all__ = ["run_script"]

MODULES = "memhier.benchmarks.workloads."
_MISSING = ("no data set", "no traces at", "is not installed")


def run_script(workload: Workload, size: Size, work: Path, environments: Path, results: Results) -> None:
    """Run a program of :mod:`memhier.benchmarks.workloads` once, unless that was done.

    It runs with the interpreter of its group where ``memhier bench install`` made one for the packages that the
    workload's parameter ``install`` lists; a rival that cannot be imported is the program's to report.
    """
    task = f"{workload.name}/{size}"
    parameters = workload.at(size)
    arguments = [*map(str, parameters.get("arguments", ()))]
    if results.is_done(task, " ".join(arguments)):
        return
    about = {"workload": workload.name, "size": size}
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        out = Path(scratch) / "out.json"
        options = ["--dir", scratch] if parameters.get("on_device") else []
        command = [str(group_python(workload.group, environments)), "-m", MODULES + parameters["module"], *options]
        command += [*arguments, "--json", str(out)]
        # One thread for every pool, torch's too, for rivals as for us; what a script starts itself it starts knowingly.
        environment = os.environ | dict.fromkeys(ONE_THREAD, "1")
        started = time.perf_counter()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=parameters["timeout_s"], env=environment
            )
        except subprocess.TimeoutExpired:
            why = f"took longer than {parameters['timeout_s']:,.0f} s"
            results.add(task, kind="failed", stage="run", why=why, **about)
            return
        seconds = time.perf_counter() - started
        if done.returncode or not out.exists():
            why = last_words(done.stderr) or f"ended with {done.returncode} and no words"
            # These programs say so in these words when they find no data or no rival to be held against.
            kind = "skipped" if any(words in why for words in _MISSING) else "failed"
            results.add(task, kind=kind, stage="run", why=why, **about)
            return
        figures = json.loads(out.read_text())
        try:
            Record.read(figures)
        except ValueError as error:
            results.add(task, kind="failed", stage="figures", why=str(error), **about)
            return
        shown = shlex.join(["python", *command[1:3], *arguments])
        outcome = {"figures": figures, "words": done.stdout, "wall_s": seconds, "command": shown}
        results.add(task, kind="script", settings=" ".join(arguments), **outcome, **about)

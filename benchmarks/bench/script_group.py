"""Runs the workloads that are programs of their own, and keeps their figures and output."""

import json
import shlex
import tempfile
import time
from pathlib import Path

from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.bench.results import Results
from memhier.benchmarks.bench.workload import Size, Workload
from memhier.benchmarks.machine import Neighbours
from memhier.benchmarks.peers.child import last_words, run_child
from memhier.benchmarks.peers.process import group_python

__all__ = ["run_script"]

MODULES = "memhier.benchmarks.workloads."
_MISSING = ("no data set", "no traces at", "is not installed")


def run_script(
    workload: Workload, size: Size, work: Path, environments: Path, results: Results, resume: bool = False
) -> None:
    """Run a program of :mod:`memhier.benchmarks.workloads` once, unless that was done.

    It runs with the interpreter of its group if ``memhier bench install`` made one for the packages in the workload's
    parameter ``install``. The program reports a rival that it cannot import. ``--workload`` names the workload if its
    file has a table of options. One with the parameter ``keeps`` gets a folder beside `work`, to keep the parts of its
    result that are finished, and goes on with those if it is to `resume`.
    """
    task = f"{workload.name}/{size}"
    parameters = workload.at(size)
    arguments = [*map(str, parameters.get("arguments", ()))]
    if results.is_done(task, " ".join(arguments)):
        return
    about = {"workload": workload.name, "size": size}
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        out = Path(scratch) / "out.json"
        options = ["--workload", workload.name] if "options" in parameters else []
        place = ["--dir", scratch] if parameters.get("on_device") else []
        if parameters.get("keeps"):
            kept = work.parent / "kept" / f"{workload.name}-{size}"
            place += ["--runs", str(kept), *(["--resume"] if resume else [])]
        python, module = group_python(workload.group, environments), MODULES + parameters["module"]
        started = time.perf_counter()
        with Neighbours() as neighbours:
            # A script that starts threads or processes itself does so knowingly.
            ended = run_child(
                python, module, [*options, *place, *arguments, "--json", str(out)], parameters["timeout_s"]
            )
        seconds = time.perf_counter() - started
        if ended.status is None:
            why = f"took longer than {parameters['timeout_s']:,.0f} s"
            results.add(task, kind="failed", stage="run", why=why, **about)
            return
        if ended.status or not out.exists():
            missing = any(words in last_words(ended.complained) for words in _MISSING)
            # The words of these programs for missing data and for a missing rival.
            kind, why = ("skipped", last_words(ended.complained)) if missing else ("failed", ended.why)
            results.add(task, kind=kind, stage="run", why=why, **about)
            return
        try:
            figures = json.loads(out.read_text())
            Record.read(figures)
        except ValueError as error:
            results.add(task, kind="failed", stage="figures", why=str(error), **about)
            return
        command = shlex.join(["python", "-m", module, *options, *arguments])
        outcome = {"figures": figures, "words": ended.said, "wall_s": seconds, "others": neighbours.cores}
        results.add(task, kind="script", settings=" ".join(arguments), command=command, **outcome, **about)

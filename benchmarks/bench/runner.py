"""Runs workloads one after the other and records the machine, then their results."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memhier.benchmarks.bench.results import Results
from memhier.benchmarks.bench.script_group import run_script
from memhier.benchmarks.bench.search_group import run_search
from memhier.benchmarks.bench.workload import Size, Workload
from memhier.benchmarks.machine import Neighbours, describe_machine, profile_device

__all__ = ["Plan", "run"]


@dataclass(frozen=True, slots=True)
class Plan:
    """The workloads to run, and the folders for them.

    Attributes
    ----------
    workloads, size
        Which, and how large.
    work
        A folder on the device to be measured, for data and indexes; both are kept for the next run.
    environments
        The folder of the peers' virtual environments.
    only
        Names of peers or adapters; all when empty.
    resume
        Whether programs that keep their parts go on with those.
    """

    workloads: list[Workload]
    size: Size
    work: Path
    environments: Path
    only: tuple[str, ...] = ()
    resume: bool = False


def run(plan: Plan, results: Results, say: Callable[[str], None]) -> None:
    """Run every task that has no outcome yet; a workload that fails does not stop the next."""
    scratch = plan.work / "scratch"
    # Left by a run that was killed.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    say("measuring the device")
    with Neighbours() as neighbours:
        device = profile_device(plan.work)
    about = describe_machine() | {"others": neighbours.cores}
    results.add(f"machine/{time.time_ns()}", kind="machine", device=device, **about)
    for workload in plan.workloads:
        _note(results, workload, plan.size, "planned")
    for workload in plan.workloads:
        say(f"{workload.name}: {workload.about}")
        try:
            if workload.function == "search":
                run_search(workload, plan.size, plan.work, plan.environments, results, plan.only, say)
            else:
                run_script(workload, plan.size, scratch, plan.environments, results, plan.resume)
        except Exception as error:
            failed = {"workload": workload.name, "size": plan.size, "stage": "run"}
            results.add(f"{workload.name}/{plan.size}", kind="failed", why=f"{type(error).__name__}: {error}", **failed)
        _note(results, workload, plan.size, "finished")


def _note(results: Results, workload: Workload, size: Size, state: str) -> None:
    """Record the progress of a workload: without it the report of a killed run would look whole."""
    results.add(f"{workload.name}/{size}/state", kind="state", state=state, workload=workload.name, size=size)

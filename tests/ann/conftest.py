"""Fixtures of the tests of an index's life."""

import os
import threading
import time
from contextlib import contextmanager

import pytest

from memhier.ann.zoom.renewal import merge
from memhier.ann.zoom.storage import layout
from memhier.files import RealFiles


def pytest_configure(config):
    for name in ("benchmark", "vcr"):  # of plug-ins that langchain-tests asks for and test_langchain.py does not need
        config.addinivalue_line("markers", f"{name}: of langchain-tests")


@pytest.fixture
def small_sizes(monkeypatch):
    """Make spills, joins and chunks so small that they happen all the time."""
    monkeypatch.setattr(layout, "_FRESH_MOST", 3000)
    monkeypatch.setattr(layout, "_VECTORS_PER_LIST", 25)
    monkeypatch.setattr(merge, "_CHUNK_BYTES", 4000)


@pytest.fixture
def usual_priority(monkeypatch):
    """Give audits the priority of the other threads: on a busy machine those of the lowest hardly run."""
    monkeypatch.setattr(os, "setpriority", lambda which, who, priority: None)


BESIDE = ("zoom-join", "zoom-renew", "items-renew")  # threads of the work beside the commits


class SwitchedFiles:
    """A file layer that can be exchanged for another at any moment.

    Work beside the commits has one of its own, `beside`: it runs at any time, so with its calls the count of a change's
    calls would differ from run to run.
    """

    def __init__(self):
        self.files = self.beside = RealFiles()

    def __getattr__(self, name):
        return getattr(self.beside if threading.current_thread().name in BESIDE else self.files, name)


@pytest.fixture
def switched_files():
    """Return the class of file layers that can be exchanged."""
    return SwitchedFiles


DEADLINE_S = 100.0  # of a machine under load; pytest ends a test later


@pytest.fixture
def renewed():
    """Return what commits until an index has been made anew, where that is called for."""

    def wait(index):
        deadline = time.monotonic() + DEADLINE_S
        while (stands := index.stats()["renewal"]) in ("due", "running", "ready"):
            assert time.monotonic() < deadline, index.stats()
            time.sleep(0.01)
            if stands != "running":
                index.commit()

    return wait


@pytest.fixture
def held(monkeypatch):
    """Return what lets a function of a module wait within its block; it gives the calls that wait, or waited."""

    @contextmanager
    def hold(module, name):
        work, go, begun = getattr(module, name), threading.Event(), []

        def waits(*arguments):
            begun.append(1)
            assert go.wait(600)
            return work(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, waits)
            try:
                yield begun
            finally:
                go.set()

    return hold

"""``memhier serve`` as users start it: many clients, mixed options, the end under load, and shards."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the extra serve; `make test-cluster` installs it")
import httpx
import psutil

from memhier.ann import ZoomIndex
from memhier.ann.cluster import ShardedIndex

MEMHIER = (sys.executable, "-c", "from memhier.benchmarks.cli.main import main; main(prog_name='memhier')")
DIMENSION, CLIENTS = 12, 64
RANDOM = np.random.default_rng(0)
VECTORS = RANDOM.normal(size=(3000, DIMENSION)).astype(np.float32)
QUERIES = RANDOM.normal(size=(400, DIMENSION)).astype(np.float32)
GIVEN = {"attributes": {"n": range(3000)}, "documents": [{"text": f"number {row}"} for row in range(3000)]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "index"
    ZoomIndex.build(path, VECTORS, dram="12MiB", **GIVEN).close()
    return path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(path, *options, token=None, end=signal.SIGTERM):
    """Run the command, and yield it with its address once it serves; nothing that it started is left afterwards."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "MEMHIER_TOKEN"}
    command = [*MEMHIER, "serve", str(path), "--port", str(port), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=environment | ({} if token is None else {"MEMHIER_TOKEN": token}),
    )  # fmt: skip
    started = []
    try:
        told = process.stdout.readline()
        assert told.startswith("Serving"), process.communicate(timeout=60)
        started = psutil.Process(process.pid).children(recursive=True)
        yield process, f"http://127.0.0.1:{port}"
        if process.poll() is None:
            process.send_signal(end)
        out, errors = process.communicate(timeout=120)
        assert (process.returncode, "Traceback" in errors) == (0, False), out + errors
        _, left = psutil.wait_procs(started, timeout=60)
        assert left == []
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        for each in started:
            if each.is_running():
                each.kill()


def wanted(number):
    """Return the options of one client, of which there are eight kinds."""
    options = {"k": 3 + number % 2, "recall": 1.0 if number % 4 < 2 else 0.9}
    return options | ({"where": "n < 1000", "fields": ["text"]} if number % 8 < 4 else {})


def ask(client, number, url):
    queries = QUERIES[number : number + 1 + number % 5]
    return queries, client.post(f"{url}/search", json={"vectors": queries.tolist(), **wanted(number)})


def check(answer, queries, index, options):
    assert answer.status_code == 200, answer.text
    found = index.search(queries, **options)
    assert answer.json()["ids"] == found.ids.tolist()
    assert answer.json().get("rows") == (found.rows() if "fields" in options else None)


def test_64_clients_with_mixed_options_get_their_own_answers(place):
    with served(place, token="secret word", end=signal.SIGINT) as (_, url), ZoomIndex.open(place) as index:
        headers = {"Authorization": "Bearer secret word"}
        assert httpx.post(f"{url}/search", json={}).status_code == 401

        def run(number):
            with httpx.Client(headers=headers, timeout=120) as client:
                return [ask(client, number + CLIENTS * turn, url) for turn in range(5)]

        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = [*threads.map(run, range(CLIENTS))]
        for number, of_client in enumerate(answers):
            for turn, (queries, answer) in enumerate(of_client):
                check(answer, queries, index, wanted(number + CLIENTS * turn))
        text = httpx.get(f"{url}/metrics", headers=headers).text
        assert f'memhier_requests_total{{status="200"}} {CLIENTS * 5}.0' in text
        assert httpx.get(f"{url}/health").json()["vectors"] == 3000


def test_the_end_under_load_loses_no_request_that_had_come(place):
    with served(place) as (process, url):
        begun, ended = threading.Barrier(9), []

        def run(number):
            """Ask until the server is gone; return the statuses."""
            found = []
            with httpx.Client(timeout=120) as client:
                for turn in range(10**6):
                    sent = time.monotonic()
                    try:
                        found.append(ask(client, (number * 17 + turn) % 300, url)[1].status_code)
                    except httpx.TransportError:
                        assert ended, "refused before the end"
                        assert sent > ended[0], "a request that had come was lost"
                        return found
                    if turn == 3:
                        begun.wait()
            raise AssertionError("the server does not end")

        with ThreadPoolExecutor(8) as threads:
            runs = [threads.submit(run, each) for each in range(8)]
            begun.wait()
            time.sleep(0.5)
            ended.append(time.monotonic())
            process.send_signal(signal.SIGTERM)
            for each in runs:
                found = each.result()
                assert set(found) <= {200, 503}
                assert found == sorted(found), "answered after it was refused"
                assert found[:4] == [200] * 4


def test_shards_are_served_as_one_index(ray, tmp_path):
    with ShardedIndex.build(tmp_path / "sharded", VECTORS, shards=2, dram="12MiB", **GIVEN) as sharded:
        exact = sharded.search(QUERIES[:20], 5, recall=1.0, fields=["text"])
    with served(tmp_path / "sharded") as (_, url), httpx.Client(base_url=url, timeout=120) as client:
        body = {"vectors": QUERIES[:20].tolist(), "k": 5, "recall": 1, "fields": ["text"], "partial": True}
        answer = client.post("/search", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["ids"] == exact.ids.tolist()
        assert answer.json()["rows"] == exact.rows()
        assert client.get("/health").json() == {
            "status": "ok", "vectors": 3000, "dimension": DIMENSION, "metric": "l2",
            "fields": {"n": "int64", "text": "document"},
        }  # fmt: skip
        refused = client.post("/search", json={"vectors": QUERIES[:1].tolist(), "nprobe": 3})
        assert (refused.status_code, "ShardedIndex has no such option" in refused.text) == (422, True)
        refused = client.post("/search", json={"vectors": QUERIES[:1].tolist(), "fields": ["author"]})
        assert (refused.status_code, "author" in refused.text) == (422, True)


def test_what_cannot_be_served_is_told_in_a_line(place, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        (tmp_path / "empty").mkdir()
        for arguments, words in (
            ([place, "--port", port], "expected a free port"), ([tmp_path / "empty"], "empty"),
            ([place, "--host", "192.0.2.77"], "192.0.2.77"), ([place, "--token", "short"], "token has 5 characters"),
            ([place, "--max-body", "lots"], "--max-body"),
        ):  # fmt: skip
            command = [*MEMHIER, "serve", *map(str, arguments)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode in (1, 2), done
            assert done.stderr.count("\n") == 1, done.stderr
            assert done.stderr.startswith("Error: ")
            assert words in done.stderr

"""``memhier serve``: an index behind HTTP on this machine."""

import logging
import signal
import threading
from typing import Any

import click

from memhier.benchmarks.cli.index.inputs import read_path
from memhier.benchmarks.cli.shell import FiniteRange, working
from memhier.budget import parse_bytes

__all__ = ["serve"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command()
@read_path
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port to listen at.")
@click.option("--token", envvar="MEMHIER_TOKEN", help="Requests have to carry this text, as 'Authorization: Bearer "
              "TOKEN'. Others on this machine see options: set MEMHIER_TOKEN instead.")  # fmt: skip
@click.option("--max-vectors", type=click.IntRange(1), default=1024, show_default=True,
              help="Query vectors of a request at most.")  # fmt: skip
@click.option("--max-k", type=click.IntRange(1), default=1000, show_default=True,
              help="Neighbours of a query at most.")  # fmt: skip
@click.option("--max-hits", type=click.IntRange(1), default=65536, show_default=True,
              help="Vectors times neighbours of a request at most.")  # fmt: skip
@click.option("--max-body", default="8MiB", show_default=True, help="Bytes of a request at most.")
@click.option("--max-requests", type=click.IntRange(1), default=128, show_default=True,
              help="Requests that run or wait at a time; others are told to come back.")  # fmt: skip
@click.option("--max-batch", type=click.IntRange(1), default=256, show_default=True,
              help="Query vectors of one search, into which requests are joined.")  # fmt: skip
@click.option("--searches", type=click.IntRange(1), default=2, show_default=True, help="Searches at a time.")
@click.option("--refresh", "refresh_seconds", type=FiniteRange(0, min_open=True),
              help="Look for a newer commit every so many seconds.")  # fmt: skip
def serve(path: str, host: str, port: int, token: str | None, max_body: str, **limits: Any) -> None:
    """Serve the index at PATH over HTTP, until Ctrl-C or SIGTERM.

    PATH is a directory, also one of shards, or the URL of a backup. POST /search takes JSON or a .npy file; GET
    /health, /metrics and /docs tell of the server. At the end running requests are answered first.
    """
    from memhier.ann.serving import IndexServer, ServingOptions

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    options = ServingOptions(max_body=parse_bytes(max_body, "--max-body"), token=token, **limits)
    ended = threading.Event()
    with working("Starting Ray and opening the index ..."):
        server = IndexServer(path, options, host, port)
    before = {each: signal.signal(each, lambda *_: ended.set()) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        click.echo(f"Serving {path} at {server.url}; its pages are at {server.url}/docs")
        if token is None and host not in _LOOPBACK:
            click.echo("note: without a token anyone who reaches this address may search", err=True)
        ended.wait()
        click.echo("Ending once running requests are answered")
    finally:
        server.close()
        for each, handler in before.items():
            signal.signal(each, handler)

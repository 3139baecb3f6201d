"""A server of one index on this machine: Ray, Ray Serve and the deployment, started and ended together."""

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from typing import Any

from memhier.ann.serving.deployment import application, is_sharded, open_index
from memhier.ann.serving.options import ServingOptions
from memhier.ann.serving.serve_extra import ray, serve
from memhier.arguments import check_int
from memhier.closing import Closing

__all__ = ["IndexServer"]

_NAME, _DRAIN_SECONDS = "memhier", 60
_QUIET = {"log_level": "WARNING", "enable_access_log": False}
_PATIENCE_S = 60.0  # for processes to end
_STORE_BYTES = 128 << 20  # of Ray's object store: requests do not pass through it


class IndexServer(Closing):
    """A server of one index on this machine, with a Ray of its own, until it is closed.

    The replica itself listens at the port: Ray Serve calls this direct ingress. The way over a proxy of Ray Serve takes
    five times the processor time for a request of one vector.

    Parameters
    ----------
    path
        Of a :class:`ZoomIndex`, or of a :class:`ShardedIndex` whose shards are on this machine. The server answers
        with the vectors that were committed when it started, or later with ``refresh_seconds`` of its options.
    options
        Limits and token.
    host, port
        The address to listen at. Another than ``127.0.0.1`` lets other machines in: then give a token.

    Attributes
    ----------
    url
        The address of the server.

    Raises
    ------
    OSError
        When the port is in use, or `host` is no address of this machine.
    RuntimeError
        When a Ray runs in this process already.
    TimeoutError
        When Ray does not start within its half minute.
    FileNotFoundError, FormatError, CorruptionError
        When there is no index at `path`, or it is damaged.

    Examples
    --------
    >>> import json, tempfile, urllib.request
    >>> import numpy as np
    >>> from memhier.ann import ZoomIndex
    >>> from memhier.ann.serving import IndexServer
    >>> path = tempfile.mkdtemp() + "/index"
    >>> ZoomIndex.build(path, np.eye(4, dtype="float32"), dram="1MiB").close()
    >>> body = json.dumps({"vectors": [0, 0, 1, 0], "k": 1}).encode()
    >>> with IndexServer(path, port=8471) as server:
    ...     asked = urllib.request.Request(f"{server.url}/search", body, {"Content-Type": "application/json"})
    ...     json.load(urllib.request.urlopen(asked))["ids"]
    [2]
    """

    def __init__(
        self, path: str | PathLike[str], options: ServingOptions | None = None, host: str = "127.0.0.1",
        port: int = 8000,
    ) -> None:  # fmt: skip
        if ray.is_initialized():
            raise RuntimeError("a Ray runs in this process: run memhier.ann.serving.application there")
        _check_free(host, check_int("port", port, 1, 65535))
        self._address = host, port
        self.url: str = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if not (sharded := is_sharded(path)):
            open_index(path).close()  # refused in words here, and in Ray's log by the replica
        _start_ray(port)
        try:
            if sharded:
                open_index(path).close()
            # The port of the proxy, which has nothing to do, is any.
            serve.start(http_options={"host": host, "port": 0}, logging_config=_QUIET)
            self._handle: Any = serve.run(application(path, options), name=_NAME, logging_config=_QUIET)
        except BaseException:
            ray.shutdown()
            raise

    def close(self) -> None:
        """Refuse new requests, wait up to a minute until none runs, and end all processes. May be called twice."""
        if ray.is_initialized():
            try:
                with suppress(TimeoutError):
                    self._handle.drain.remote().result(timeout_s=_DRAIN_SECONDS)
                serve.delete(_NAME)  # the answers under way are sent
            finally:
                ray.shutdown()
                _await_free(*self._address)  # the processes end a moment later


def _check_free(host: str, port: int) -> None:
    """Refuse an address at which nothing can listen."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        words = error.strerror or str(error)
        raise OSError(error.errno or errno.EADDRNOTAVAIL, f"{words}: expected a free port", f"{host}:{port}") from error


def _start_ray(port: int) -> None:
    """Start Ray on this machine, whose processes serve at a port."""
    with _direct_ingress(port):
        try:
            ray.init(
                address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                object_store_memory=_STORE_BYTES,
            )  # fmt: skip
        except Exception as error:  # Ray raises no kind of its own
            raise TimeoutError(f"Ray does not start; on a busy machine try again: {error}") from error


def _await_free(host: str, port: int) -> None:
    """Wait until an address is free, for a bounded time."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            _check_free(host, port)
            return
        except OSError:
            if time.monotonic() > deadline:
                return
        time.sleep(0.05)


@contextmanager
def _direct_ingress(port: int) -> Iterator[None]:
    """Let the processes of a Ray that starts now serve from the replica itself, as Ray Serve documents it."""
    wanted = {
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(port + 1),  # not included
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # close() has drained it
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

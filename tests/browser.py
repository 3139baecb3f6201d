"""A Chromium without a window, driven over a pipe in the words of its DevTools protocol."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Browser", "find_chromium"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WAIT = 240.0  # seconds for one answer
# It reads from descriptor 3 and writes to 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find_chromium() -> str | None:
    """Return the path of a Chromium, None where there is none on PATH."""
    return next((place for name in _NAMES if (place := shutil.which(name))), None)


class Browser:
    """One page of a Chromium; it notes errors and requests.

    Parameters
    ----------
    program
        Of the Chromium.
    folder
        For its profile.

    Attributes
    ----------
    errors
        Exceptions and messages of the console, but plain logs, as text.
    requests
        URLs that the page asked for.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        ours, theirs = os.pipe(), os.pipe()
        self._out, self._in = ours[1], theirs[0]
        self._numbers, self._rest, self._session, self._loaded = 0, b"", "", False
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (ours[0], theirs[1])]
        # The sandbox needs rights that containers lack; the page is a file of the test's own.
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, ends), program, *flags, "--remote-debugging-pipe",
             f"--user-data-dir={folder}", "about:blank"],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (ours[0], theirs[1], *ends):
            os.close(end)

    def open(self, page: Path) -> None:
        """Load a file and wait until it is there."""
        self._loaded = False
        self._call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._take()

    def show(self, width: int, height: int, *, dark: bool) -> None:
        """Set the size of the window, in CSS pixels, and the scheme of colours that the user likes."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """Return the value of an expression in JavaScript."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, place: Path) -> None:
        """Write the whole page as PNG."""
        place.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def __enter__(self) -> Self:
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        os.close(self._out)  # by which it ends, with all of its processes
        try:
            self._process.wait(_WAIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def _call(self, method: str, **values: Any) -> Any:
        self._numbers += 1
        sent = {"id": self._numbers, "method": method, "params": values}
        if self._session:
            sent["sessionId"] = self._session
        os.write(self._out, json.dumps(sent).encode() + b"\0")
        while True:
            message = self._take()
            if message.get("id") == self._numbers:
                assert "error" not in message, message["error"]
                return message["result"]

    def _take(self) -> dict[str, Any]:
        """Return the next message, and note what it tells of the page."""
        end = time.monotonic() + _WAIT
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            more = os.read(self._in, 1 << 20) if ready else b""
            if not more:
                raise TimeoutError(f"Chromium gave no answer within {_WAIT:g} s, or ended")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method, values = message.get("method"), message.get("params", {})
        self._loaded |= method == "Page.loadEventFired"
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(values["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        return message

"""A real browser, driven over a pipe with the DevTools protocol: no driver, no websocket, no package."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, in a container
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--password-store=basic",
)


class PageError(AssertionError):
    """Something in the page threw, or what was waited for never came."""


class Browser:
    """One process, one page at a time. Messages are JSON that ends with a zero byte."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer = b""
        self._number = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []  # all that the page told since it was opened

    def call(self, method: str, seconds: float = 30.0, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + seconds
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") != self._number:
                self.events.append(answer)
                continue
            if "error" in answer:
                raise PageError(f"{method}: {answer['error']['message']}")
            result: dict[str, Any] = answer["result"]
            return result

    def _receive(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise PageError(f"the browser does not answer {what}")
            self._buffer += os.read(self._read, 1 << 20)
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    # ---- a page

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """A page with storage of its own."""
        self.session, self.events = None, []
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.theme("dark" if dark else "light")
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        self.resize(width, height)
        self._context = context

    def reload(self) -> None:
        self.js("window.before = true")
        self.call("Page.reload")
        self.wait("!window.before && document.readyState === 'complete'")

    def close(self) -> None:
        self.session = None
        self.call("Target.disposeBrowserContext", browserContextId=self._context)

    def resize(self, width: int, height: int) -> None:
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.wait(f"innerWidth === {width}")
        self.js("new Promise(requestAnimationFrame)")  # laid out anew

    def theme(self, name: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def js(self, expression: str, seconds: float = 30.0) -> Any:
        """The value of an expression; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate",
            seconds,
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if wrong := answer.get("exceptionDetails"):
            raise PageError(wrong.get("exception", {}).get("description", wrong["text"]))
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.js(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise PageError(f"it never came true: {condition}")
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """As a person would: at its place on the screen."""
        place = self.js(
            "(selector => { const e = document.querySelector(selector); e.scrollIntoView({block: 'nearest'});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })"
            f"({json.dumps(selector)})"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, **more: Any) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
        code = codes.get(key, ord(key[0].upper()))
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Exceptions nobody caught, errors in the console, and what the content security policy refused."""
        self.js("1")  # what was said before this has arrived
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
                found.append(str(params["args"]))
        return found

    def requested(self) -> list[str]:
        """Every address the page has asked for."""
        self.js("1")
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]


@contextmanager
def browser() -> Iterator[Browser]:
    """Where there is none the test is skipped; in CI, where one is installed, it fails."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        missing = "no chromium on this machine: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="quire-chromium-", ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            # The pipe is expected at 3 and 4. A shell puts it there; bash takes numbers of more than one digit.
            ["bash", "-c", f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}', "bash", program, *flags],
            pass_fds=(to_browser[0], from_browser[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        driven = Browser(from_browser[0], to_browser[1])
        try:
            yield driven
        finally:
            driven.session = None
            with suppress(PageError, OSError):
                driven.call("Browser.close", 5.0)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_browser[0])
            os.close(to_browser[1])

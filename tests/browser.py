"""Headless Chromium, driven through a pipe: pages as a reader sees them. Only the command `chromium` is needed."""

import base64
import json
import os
import subprocess
import tempfile
import time
from shutil import which

CHROMIUM = which("chromium")
OPENS = 30.0
"""Seconds in which a page must open."""


class Browser:
    """One tab. `problems` are the errors and uncaught exceptions of the pages it has opened."""

    def __init__(self):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        words = [  # Chromium reads commands from descriptor 3, and writes answers to 4.
            *("bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "chromium", CHROMIUM),
            *("--headless", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu"),
            *("--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={self._profile.name}"),
        ]
        self._process = subprocess.Popen(
            words,
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._rest, self._number, self._session, self.problems = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _message(self):
        while b"\0" not in self._rest:
            read = os.read(self._from, 1 << 20)
            if not read:
                raise EOFError("chromium has ended")
            self._rest += read
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        about = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = about["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", str(details)))
            case "Runtime.consoleAPICalled" if about["type"] == "error":
                self.problems.append(str([arg.get("value") for arg in about["args"]]))
            case "Log.entryAdded" if about["entry"]["level"] == "error":
                self.problems.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        return message

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def open(self, address, width, height=800):
        """Open a page in a window of this width, and wait until it has been drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=str(address))
        self.settle(address)

    def settle(self, address=""):
        """Wait until the page that is being opened has been drawn."""
        time.sleep(0.1)
        end = time.monotonic() + OPENS
        while self.value("document.readyState") != "complete":
            assert time.monotonic() < end, f"{address} is not open after {OPENS} s"
            time.sleep(0.05)
        self.value("new Promise(done => requestAnimationFrame(() => setTimeout(done, 300)))")

    def value(self, expression):
        """Return the value of a JavaScript expression; of a promise, once it is kept."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key):
        for kind in ("rawKeyDown", "keyUp"):
            code = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35}.get(key, 0)
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def picture(self, path):
        """Write a screenshot of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000)}
        data = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**clip, "scale": 1}
        )
        path.write_bytes(base64.b64decode(data["data"]))

    def close(self):
        os.close(self._to)
        self._process.terminate()
        self._process.wait()
        os.close(self._from)
        self._profile.cleanup()

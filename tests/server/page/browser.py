"""Headless Chromium, driven through its DevTools protocol: just what the page's tests need of a browser."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

PATIENCE = 60.0  # seconds; a deadline for a machine that is busy, not a wait


def chromium() -> str | None:
    """The program, if one is installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One tab. `async with Browser() as browser`."""

    async def __aenter__(self) -> Browser:
        program = chromium()
        assert program is not None
        self._profile = Path(tempfile.mkdtemp(prefix="page-test-"))
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                 "--remote-debugging-port=0", f"--user-data-dir={self._profile}", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = await self._port()
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(await self._tab(port), max_msg_size=0)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []  # console errors, exceptions and files that did not load
        self.urls: list[str] = []  # of every request
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._reader.cancel()
        await self._session.close()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        shutil.rmtree(self._profile, ignore_errors=True)

    async def call(self, method: str, **parameters: Any) -> Any:
        number = len(self._answers) + 1
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(self._answers[number], PATIENCE)

    async def open(self, url: str, *, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                        mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url="about:blank")  # the page before may still complain
        await self.until("document.readyState === 'complete' && location.href === 'about:blank'")
        self.complaints.clear()
        self.urls.clear()
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, script: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str) -> Any:
        """Asks until the script's value is true, and returns it."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                value = await self.evaluate(script)
            except RuntimeError:  # the page went away for the next one just then
                value = None
            if value:
                return value
            assert time.monotonic() < deadline, f"never true: {script}"
            await asyncio.sleep(0.02)

    async def type(self, text: str, *, enter: bool = False) -> None:
        await self.call("Input.insertText", text=text)
        if enter:
            await self.press("Enter", 13, "\r")

    async def press(self, key: str, code: int, text: str = "") -> None:
        more = {"text": text} if text else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **more)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def move_to(self, x: float, y: float) -> None:
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def screenshot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    async def _tab(self, port: int) -> str:
        """Address of the tab, once there is one."""
        deadline = time.monotonic() + PATIENCE
        while True:
            async with self._session.get(f"http://127.0.0.1:{port}/json") as response:
                tabs = [target for target in await response.json() if target["type"] == "page"]
            if tabs:
                return str(tabs[0]["webSocketDebuggerUrl"])
            assert time.monotonic() < deadline, "Chromium opens no tab"
            await asyncio.sleep(0.05)

    async def _port(self) -> int:
        file = self._profile / "DevToolsActivePort"
        deadline = time.monotonic() + PATIENCE
        while not file.exists() or not file.read_text().strip():
            assert self._process.poll() is None and time.monotonic() < deadline, "Chromium does not start"
            await asyncio.sleep(0.05)
        return int(file.read_text().split()[0])

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                if "error" in event:
                    self._answers[event["id"]].set_exception(RuntimeError(event["error"]["message"]))
                else:
                    self._answers[event["id"]].set_result(event["result"])
            elif event["method"] == "Network.requestWillBeSent":
                self.urls.append(event["params"]["request"]["url"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.complaints.append(event["params"]["entry"]["text"])

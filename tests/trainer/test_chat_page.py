"""The page in a headless Chromium, over its DevTools: an answer streams, stop ends it, clear empties it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import serving, write_checkpoint

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: scripts/bootstrap.sh browser installs it"),
]


class Page:
    """A page of a browser, by the messages of DevTools."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.number = socket, 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            reply = json.loads(self.socket.recv(timeout=60))
            if reply.get("id") == self.number:
                assert "error" not in reply, reply
                return dict(reply["result"])

    def value(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < deadline, (script, self.value("document.body.innerText"))
            time.sleep(0.05)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    client = pytest.importorskip("websockets.sync.client")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    command += ["--window-size=900,640", f"--user-data-dir={tmp_path / 'profile'}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ready = tmp_path / "profile" / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (ready.exists() and ready.read_text().strip()):
            assert process.poll() is None, "chromium ended"
            assert time.monotonic() < deadline, "chromium did not start"
            time.sleep(0.05)
        port = ready.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as reply:
            (target,) = [each for each in json.load(reply) if each["type"] == "page"]
        with client.connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(20)


def test_a_person_chats_on_the_page(page: Page, tmp_path: Path) -> None:
    with serving(write_checkpoint(tmp_path), delay=0.02) as (url, scheduler):
        page.call("Page.enable")
        page.call("Page.navigate", url=url)
        page.wait_for("document.readyState === 'complete' && at('model').textContent === 'Run tiny, step 7'")
        assert page.value("document.activeElement.id") == "text"
        unlabelled = "[...document.querySelectorAll('input,textarea')].filter(x => !x.labels.length).length"
        assert page.value(unlabelled) == 0
        page.value("at('temperature').value = 0")
        page.call("Input.insertText", text="Why is the sky blue?")
        for kind in ("rawKeyDown", "keyUp"):
            page.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13
            )
        page.wait_for("(document.querySelector('.assistant')?.lastChild.textContent ?? '').length > 3")
        assert page.value("at('stop').disabled") is False
        page.wait_for("!at('send').disabled || messages.length === 1")
        page.value("at('stop').click()")
        page.wait_for("!at('send').disabled")
        assert page.value("document.querySelector('.assistant .who').textContent") == "Run tiny, step 7"
        assert page.value("at('spoken').textContent.length") > 3
        picture = page.call("Page.captureScreenshot", format="png")["data"]
        if target := os.environ.get("NANOFLEET_CHAT_PICTURE"):
            Path(target).write_bytes(base64.b64decode(picture))
        page.value("at('clear').click()")
        assert page.value("at('log').children.length + messages.length") == 0
        deadline = time.monotonic() + 10
        while scheduler.active and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not scheduler.active

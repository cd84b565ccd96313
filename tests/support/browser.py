"""Pages as Chromium shows them, in frames of given widths."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")

_PROBE = """<script>
addEventListener('load', () => setTimeout(() => {
  const cut = [...document.querySelectorAll('SELECTOR')].filter(each => each.scrollWidth > each.clientWidth);
  const said = cut.map(each => each.textContent.trim().slice(0, 40));
  parent.postMessage([location.pathname.split('/').pop(), innerWidth, said], '*');
}, 100));
</script></body>"""

_FRAMES = """<body><script>
const found = [];
onmessage = event => { found.push(event.data); document.body.dataset.found = JSON.stringify(found); };
</script>FRAMES</body>"""


def opened(page: Path, user: Path) -> str:
    """The document that a page becomes. Raises AssertionError for a message on the console."""
    options = ["--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={user}"]
    command = ["chromium", "--headless", *options, "--window-size=1500,1000", "--virtual-time-budget=10000"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def what_is_cut(pages: Sequence[Path], widths: Sequence[int], selector: str, folder: Path) -> dict[str, list[str]]:
    """Return the beginnings of contents that must be scrolled sideways, by page and width, among a selector's elements.

    This changes the pages.
    """
    for page in pages:
        text = page.read_text(encoding="utf-8").replace("img-src data:", "img-src data:; script-src 'unsafe-inline'")
        page.write_text(text.replace("</body>", _PROBE.replace("SELECTOR", selector)), encoding="utf-8")
    frames = [
        f'<iframe src="{page.as_uri()}" style="width: {width}px; height: 900px; border: 0"></iframe>'
        for page in pages
        for width in widths
    ]
    (folder / "frames.html").write_text(_FRAMES.replace("FRAMES", "\n".join(frames)), encoding="utf-8")
    match = re.search(r'data-found="([^"]*)"', opened(folder / "frames.html", folder / "user"))
    assert match is not None
    measurements: list[Any] = json.loads(html.unescape(match[1]))
    assert len(measurements) == len(pages) * len(widths)
    return {f"{name} at {width}": beginnings for name, width, beginnings in measurements if beginnings}

"""Builds the documentation as a site: `python docs/site/build.py [FOLDER]` writes FOLDER/site, by default build/site.

Pages link as they do in a checkout, so that both work. So they are copied to FOLDER/pages first: README.md is the home
page there, and what pages link to in the checkout comes along under checkout/, text with a further .txt, which browsers
show instead of saving it. Links, anchors, images and pages that are missing are errors.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = Path(__file__).with_name("mkdocs.yml")
HOME = "index.md"

# The target of a Markdown link or of an HTML image, without its anchor.
_TARGET = re.compile(r'(\]\(|src=")([^)#"\s:]+)(?=[)#"])')


def build(folder: Path) -> list[str]:
    """Write the site, and return what is wrong with it."""
    pages = folder / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    settings = CONFIG.read_text()
    wrong = [f"{name} is not in the menu of {CONFIG.name}" for name in _stage(pages) if f" {name}\n" not in settings]
    wrong += [f"{page.name} shows {image}, which is not there" for page, image in _missing_images(pages)]
    config = folder / CONFIG.name
    config.write_text(settings.replace("CHECKOUT", str(ROOT)))
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(config)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return wrong if done.returncode == 0 else [*wrong, done.stdout]


def _stage(pages: Path) -> list[str]:
    """Copy pages, and what they show; return the names of the pages."""
    names = []
    for file in [ROOT / "README.md", *sorted(DOCS.rglob("*"))]:
        if file.is_dir() or file.suffix in (".py", ".pyc", ".yml"):
            continue
        name = HOME if file == ROOT / "README.md" else file.relative_to(DOCS).as_posix()
        target = pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            names.append(name)
            target.write_text(_with_links_of_the_site(file, name, pages))
        else:
            shutil.copyfile(file, target)
    return names


def _with_links_of_the_site(page: Path, name: str, pages: Path) -> str:
    def on_the_site(match: re.Match[str]) -> str:
        file = Path(os.path.normpath(page.parent / match[2]))
        if file == ROOT / "README.md":
            target = HOME
        elif file.is_relative_to(DOCS) and file.suffix != ".py":
            target = file.relative_to(DOCS).as_posix()
        elif file.is_file() and file.is_relative_to(ROOT):
            target = _bring(file, pages)
        else:
            return match[0]  # the build says that nothing is there
        return match[1] + os.path.relpath(target, Path(name).parent)

    return _TARGET.sub(on_the_site, page.read_text())


def _bring(file: Path, pages: Path) -> str:
    name = "checkout/" + file.relative_to(ROOT).as_posix() + ("" if file.suffix in (".png", ".svg") else ".txt")
    target = pages / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)
    return name


def _missing_images(pages: Path) -> list[tuple[Path, str]]:
    shown = re.compile(r'(?:!\[[^]]*\]\(|src=")([^)"\s:]+)')
    found = [(page, image) for page in pages.rglob("*.md") for image in shown.findall(page.read_text())]
    return [(page, image) for page, image in found if not (page.parent / image).is_file()]


if __name__ == "__main__":
    problems = build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build")
    sys.exit("\n".join(problems))

"""Links of the site: README.md is the home page, and what pages link to in the checkout comes along.

Pages link as they do in a checkout, so that both work. A file outside docs is copied under checkout/, text with a
further .txt, which browsers show instead of saving it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOME = "index.md"

# The target of a Markdown link or of an HTML image, without its anchor.
_TARGET = re.compile(r'(\]\(|src=")([^)#"\s:]+)(?=[)#"])')


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, HOME, content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    folder = ROOT if here == HOME else (DOCS / here).parent

    def on_the_site(match: re.Match[str]) -> str:
        file = Path(os.path.normpath(folder / match[2]))
        if file == ROOT / "README.md":
            target = HOME
        elif file.is_relative_to(DOCS) and file.suffix != ".py":
            target = file.relative_to(DOCS).as_posix()
        elif file.is_file() and file.is_relative_to(ROOT):
            target = _bring(file, config, files)
        else:
            return match[0]  # MkDocs says that nothing is there
        return match[1] + os.path.relpath(target, Path(here).parent)

    return _TARGET.sub(on_the_site, markdown)


def _bring(file: Path, config: Any, files: Files) -> str:
    name = "checkout/" + file.relative_to(ROOT).as_posix() + ("" if file.suffix in (".png", ".svg") else ".txt")
    if files.get_file_from_path(name) is None:
        files.append(File.generated(config, name, abs_src_path=str(file)))
    return name

"""Pages are followed as a reader types them: in one terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import pages


def page(folder: Path, *texts: str) -> Path:
    """Write a page with blocks of bash, and of Python where a text is marked so."""
    path = folder / "page.md"
    all_blocks = [text if text.startswith("```") else f"```bash\n{text}\n```" for text in texts]
    path.write_text("\n\n".join(all_blocks) + "\n")
    return path


PYTHON = "```python\nfrom pathlib import Path\nassert Path.cwd().name == %r\n```"

FOLLOWED = {
    "a folder lasts": ["mkdir app && cd app", "touch here", "test -f ../app/here"],
    "over lines of a block": ["mkdir -p app/inner\ncd app\ncd inner\ntest $(basename $PWD) = inner"],
    "not out of parentheses": ["mkdir app\n(cd app && touch here)", "test -f app/here"],
    "a variable lasts": ["name=app", "export OTHER=3 && mkdir $name", 'test -d app && test "$OTHER" = 3'],
    "Python is where the shell is": ["mkdir app && cd app", PYTHON % "app", "cd ..", "test -d app"],
    "a command of ours, too": ["mkdir app && cd app", "onnx-lowering cache show", PYTHON % "app"],
    "comments and long lines": ["# cd nowhere\nmkdir \\\n  app && cd app   # there", PYTHON % "app"],
}

REFUSED = {
    "the tutorial as it was": (
        ["mkdir app && touch app/host && cd app && ls host", "test -f app/host"],
        "test -f app/host",
    ),
    "a folder that is not there": (["mkdir a && cd a", "cd a"], "No such file"),
    "a line that fails": (["echo before; false", "touch never"], "before"),
    "a part of a pipe": (["false | true"], "false | true"),
    "a name that nothing has": (["echo $nothing_at_all"], "nothing_at_all"),
    "the end of the shell": (["exit 0"], "the shell ended"),
    "a program that reads": (["read -r line"], "read -r line"),
}


@pytest.fixture(autouse=True)
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", FOLLOWED)
def test_what_lasts(case: str, start: Path) -> None:
    pages.follow(page(start, *FOLLOWED[case]))
    assert Path.cwd() == start


@pytest.mark.parametrize("case", REFUSED)
def test_what_goes_wrong(case: str, start: Path) -> None:
    texts, said = REFUSED[case]
    with pytest.raises(AssertionError, match=r"^page\.md:\d+: ") as error:
        pages.follow(page(start, *texts))
    assert said in str(error.value)
    assert Path.cwd() == start and not Path("never").exists()

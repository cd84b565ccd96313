"""Count the words that this code base avoids, and the names that say nothing.

`python -m tests.project.words [FOLDER]` prints a row for each term of the table in docs/glossary.md: what to write, how
often the words to avoid occur, and in how many files. `--files TERM` lists them by file, `--lines TERM` shows them.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOTS = ("lowering", "schedules", "docs", "examples", "benchmarks", "tests", "README.md")
TEXTS = (".py", ".md", ".c", ".cc", ".cu", ".h", ".hpp", ".ipynb")
# Generated tables, data, and the pages that name the words themselves.
EXCLUDED = re.compile(
    r"docs/(glossary|renamed|exporter_models|models|changelog)\.md|/results/|tests/(test_)?words\.py|/presets/"
)

# A word of a name or of a sentence: what stands beside it is no lower-case letter.
_WORD = r"(?<![A-Za-z]){}(?![a-z])"

# What to write, and the words to avoid. Quotations of ONNX, TVM, NumPy and Python are removed before (_QUOTED).
WORDS = {
    "matmul": r"products?",
    "accumulator": r"sums|sum_up|summed",
    "epilogue": r"tails?|tailed|becomes? of",
    "prologue": r"normed|in front of",
    "GEMV, small M": r"thin|few rows",
    "quantized value": r"codes|coded|codecs?",
    "packed lanes": r"words",
    "k-slice, fragment": r"pieces?",
    "index, offset, address": r"places?|placed",
    "KV cache layout, KV write": r"(?:a|the|its|each|that|of|one) (?:store|append)s?",
    "SM": r"multiprocessors?|dealt out|deals? out|surveys?|surveyed",
    "fuse, fold": r"absorb\w*|joiner|join_rows|joins? launches",
    "reject, unsupported": r"declin\w*",
    "let, materialize": r"held|holds?",
    "synthetic, reference": r"made[ _]up|truth|spoilt|thinned",
    "fix, expensive, cached": r"mend\w*|dear|kept|known|settl\w+",
    "American spelling": r"(?:quant|normal|initial|synchron|special|serial|recogn|legal|vector|material|optim)is"
    r"(?:e|ed|es|er|ers|ing|ation)|neighbours?|colours?|behaviour|centred?|licences?",
    "is not a": r"(?:is|are|was|were|has|have) no(?= [a-z])",
    "after, before": r"behind|beside",
}
_QUOTED = re.compile(
    r"(?i)itertools\.product|(?:dot|outer|inner|cross|scalar)[ _-]products?|by[ _]product|ReduceProd\w*|truth values?"
    r"|in[ _-]?place\b|error codes?|return ?codes?|exit codes?|machine code|source code|key ?words?|stop ?words?"
    r"|32-bit words?|reproduc\w+|produc(?:er|es?|ed|ing|tion)\w*|hold(?:s|ing)? out|holds? true|sums? of squares"
)
# Variables, parameters and functions whose names say nothing.
NAMES = frozenset(
    [
        "given",
        "found",
        "made",
        "known",
        "wanted",
        "each",
        "part",
        "parts",
        "most",
        "one",
        "both",
        "cut",
        "of",
        "others",
        "mine",
        "theirs",
        "ours",
        "kept",
        "alone",
        "some",
    ]
)
_SENTENCE = re.compile(r'^\s*(?:"""|# )(?:What|Who|That|Of|Whose) ', re.MULTILINE)


def sources(folder: str = "") -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *(ROOTS if not folder else [folder])], cwd=ROOT, capture_output=True)
    names = listed.stdout.decode().split()
    return [ROOT / name for name in names if name.endswith(TEXTS) and not EXCLUDED.search(name)]


def count_names(text: str) -> int:
    """Return how many tokens of a Python file are one of NAMES."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.NAME and token.string in NAMES for token in tokens)


def count(path: Path) -> Counter[str]:
    """Return how often each term's words occur in a file."""
    return count_text(path.read_text(), path.suffix == ".py")


def count_text(text: str, is_python: bool) -> Counter[str]:
    """Return how often each term's words occur in a text."""
    plain = _QUOTED.sub("", text)
    found = {term: len(re.findall(_WORD.format(f"(?:{words})"), plain)) for term, words in WORDS.items()}
    if is_python:
        found["names that say nothing"] = count_names(text)
        found["What, Who, That, Of"] = len(_SENTENCE.findall(text))
    return Counter(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", default="", help="count there alone")
    parser.add_argument("--files", metavar="TERM")
    parser.add_argument("--lines", metavar="TERM")
    arguments = parser.parse_args()
    counts = {path: count(path) for path in sources(arguments.folder)}
    if arguments.files:
        for path, numbers in sorted(counts.items(), key=lambda item: -item[1][arguments.files]):
            if numbers[arguments.files]:
                print(f"{numbers[arguments.files]:5} {path.relative_to(ROOT)}")
        return
    if arguments.lines:
        pattern = re.compile(_WORD.format(f"(?:{WORDS[arguments.lines]})"))
        for path in counts:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if pattern.search(_QUOTED.sub("", line)):
                    print(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
        return
    total: Counter[str] = sum(counts.values(), Counter())
    for term in (*WORDS, "names that say nothing", "What, Who, That, Of"):
        print(f"{total[term]:6} {sum(bool(numbers[term]) for numbers in counts.values()):5} {term}")
    print(f"{total.total():6} total")


if __name__ == "__main__":
    main()

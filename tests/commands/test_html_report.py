"""The page of `inspect --html`: what it says and that it is right, names as text, and how a browser takes it."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

import lowering
from lowering.commands.cli import main
from lowering.demo.decoder import DecoderConfig, build_decoder
from lowering.reporting.dump import CompilationDump
from lowering.reporting.memory import read_plan
from tests.support.browser import needs_browser, opened, what_is_cut

pytestmark = pytest.mark.optimized

CONFIG = DecoderConfig(2, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=96, vocabulary=50, positions=512)
SIZES = {"batch": 1, "tokens": 128, "capacity": 256}
SECTIONS = ["overview", "kernels", "phases", "attention", "measurements", "memory", "code"]
EVIL = "<script>alert(1)</script>"
QUOTED = "q\"'><img src=x onerror=alert(2)>\x00\n"
DIM = "</style><b>"
VOID = {"meta", "link"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, tag: str | None = None, class_: str | None = None) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                classes = (child.attributes.get("class") or "").split()
                if tag in (child.tag, None) and (class_ is None or class_ in classes):
                    yield child
                yield from child.all(tag, class_)


class Reader(html.parser.HTMLParser):
    """Elements of a page, each of which must be closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert self.open == [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def section(page: Element, name: str) -> Element:
    (match,) = (element for element in page.all("section") if element.attributes["id"] == name)
    return match


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a decoder's artifact, its dump, its measurements, and the page of all of them."""
    folder = tmp_path_factory.mktemp("html")
    onnx.save(build_decoder(CONFIG), folder / "decoder.onnx")
    command = ["compile", str(folder / "decoder.onnx"), "-o", str(folder / "out"), "--donate", "cache_.*"]
    assert (
        main([*command, "--target", "cpu:x86-64-v3", "--dim", "tokens=1..300", "--dump-dir", str(folder / "dump")]) == 0
    )
    (folder / "bench.json").write_text(lowering.bench(folder / "out", SIZES, seconds=0).to_json())
    inspect = ["inspect", str(folder / "out"), "--html", str(folder / "report.html")]
    assert main([*inspect, "--dump", str(folder / "dump"), "--bench", str(folder / "bench.json")]) == 0
    return folder


@pytest.fixture(scope="module")
def page(artifacts: Path) -> Element:
    return Reader((artifacts / "report.html").read_text(encoding="utf-8")).root


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An attention that was written out, by nodes, inputs and a dimension whose names are markup; and its page."""
    folder = tmp_path_factory.mktemp("hostile")
    shape = [1, 2, DIM, 8]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in (QUOTED, "k", "v")]
    nodes = [
        helper.make_node("Transpose", ["k"], ["kt"], f"{EVIL}0", perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", [QUOTED, "kt"], ["s"], f"{EVIL}1"),
        helper.make_node("Softmax", ["s"], ["p"], f"{EVIL}2", axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["o"], f"{EVIL}3"),
        helper.make_node("Tanh", ["o"], [f"{EVIL}y"], f"{EVIL}4"),
    ]
    outputs = [helper.make_tensor_value_info(f"{EVIL}y", TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, EVIL, inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    out, dump = str(folder / "out"), str(folder / "dump")
    assert main(["compile", str(folder / "model.onnx"), "-o", out, "--dump-dir", dump]) == 0
    assert main(["inspect", out, "--html", str(folder / "report.html"), "--dump", dump]) == 0
    return folder


def test_sections_and_contents(page: Element) -> None:
    assert [element.attributes["id"] for element in page.all("section")] == SECTIONS
    (contents,) = page.all("nav")
    assert [link.attributes["href"] for link in contents.all("a")] == [f"#{name}" for name in SECTIONS]
    assert not [
        element for name in SECTIONS for element in section(page, name).all("p", "note") if "Not shown" in element.text
    ]


@pytest.mark.parametrize("which", ["artifacts", "hostile"])
def test_one_file_without_scripts(which: str, request: pytest.FixtureRequest) -> None:
    text = (request.getfixturevalue(which) / "report.html").read_text(encoding="utf-8")
    page = Reader(text).root
    for element in page.all():
        assert element.tag not in ("script", "img", "iframe", "object", "b")
        assert not [name for name in element.attributes if name.startswith("on") or name == "src"]
        assert (element.attributes.get("href") or "#").startswith(("#", "data:,"))
    (style,) = page.all("style")
    assert "url(" not in style.text and "@import" not in style.text
    (policy,) = (m for m in page.all("meta") if m.attributes.get("http-equiv") == "Content-Security-Policy")
    assert str(policy.attributes["content"]).startswith("default-src 'none';")


def test_overview_and_kernels(page: Element, artifacts: Path) -> None:
    shown, manifest = section(page, "overview").text, lowering.load(artifacts / "out").manifest
    for text in ("cpu:x86-64-v3", "[batch, 2, capacity, 16]", "donated to present_k.0", "tokens: 1 to 300"):
        assert text in shown
    assert "batch = 1, tokens = 128, capacity = 256 (as the page was told)" in shown
    rows = [[cell.text for cell in row.all("td")] for row in section(page, "kernels").all("tr")][1:]
    assert {row[1] for row in rows} == {kernel.name for kernel in manifest.kernels}
    assert sum(int(row[0]) for row in rows) == len(manifest.calls)


def test_fused_and_removed_nodes_are_marked(hostile: Path) -> None:
    """Nodes whose names are markup: what was fused is marked so, and the new node says of what it is made."""
    page = Reader((hostile / "report.html").read_text(encoding="utf-8")).root
    phases = section(page, "phases")
    lines = [line for line in phases.all("div", "line") if list(line.all("span", "chip"))]
    marks = [next(line.all("span", "chip")).text for line in lines]
    assert marks == ["removed", "fused", "fused", "fused", "new"]
    (new,) = (line for line in lines if "Attention(" in line.text)
    assert next(new.all("span", "chip")).text == "new" and f"{EVIL}3" in new.text
    assert f"{EVIL}y = Tanh(" in phases.text


def test_names_are_text(hostile: Path) -> None:
    page = Reader((hostile / "report.html").read_text(encoding="utf-8")).root
    shown = section(page, "overview").text
    assert QUOTED.replace("\x00", "\ufffd") in shown and f"{EVIL}y" in shown and f"[1, 2, {DIM}, 8]" in shown
    assert f"{DIM} = 256" in section(page, "memory").text
    assert f"Tanh {EVIL}4" in section(page, "kernels").text


def test_an_attention_and_its_tiles(page: Element) -> None:
    attention = section(page, "attention")
    facts = dict(
        zip((element.text for element in attention.all("dt")), (element.text for element in attention.all("dd")))
    )
    assert facts["Heads"] == "4 of queries, 2 of keys and values, 2 share a key/value head"
    assert facts["Visible keys"].endswith("row i sees key j where j <= i + lengths[b] - rows")
    tiles = {
        row[0].text: row[1].text
        for table in attention.all("table")
        for row in [list(table.all("td"))[k : k + 2] for k in (0, 2)]
    }
    assert tiles["prefill"].startswith("q 48, kv 64, ") and tiles["decode"].startswith("q_len 8, ")
    (caption,) = attention.all("figcaption")
    assert "prefill: tiles of 48 rows" in caption.text and "128 query rows, 256 keys" in caption.text
    # Row tile t has the rows 24 t to 24 t + 23, of which the last sees keys up to 128 + that row.
    full = sum((128 + first + 1) // 64 for first in range(0, 128, 24))
    visited = sum(-(-(128 + min(first + 24, 128)) // 64) for first in range(0, 128, 24))
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (full|partial):", caption.text)}
    assert counts == {"full": full, "partial": visited - full}
    pairs = sum(24 * (128 + first + 24) for first in range(0, 120, 24)) + 8 * 256
    assert f"{1 - pairs / (128 * 256):.0%} of all pairs skipped" in caption.text


def test_measurements(page: Element, artifacts: Path) -> None:
    measured = json.loads((artifacts / "bench.json").read_text())
    rows = [[cell.text for cell in row.all("td")] for row in section(page, "measurements").all("tr")][1:]
    assert [row[1] for row in rows] == list(measured["by_kernel"])
    assert {row[1]: int(row[3]) for row in rows} == {k: v["calls"] for k, v in measured["by_kernel"].items()}
    roofline, timeline = section(page, "measurements").all("svg")
    worked = [cost for cost in measured["by_kernel"].values() if cost["flops"] and cost["bytes"]]
    assert len(list(roofline.all("circle"))) == len(worked)
    assert len(list(timeline.all("rect"))) == len(measured["calls"])


def test_memory(page: Element, artifacts: Path) -> None:
    """Tensors that are needed at the same time are apart, inside their block, and what is left are the outputs."""
    manifest = lowering.load(artifacts / "out").manifest
    dump = CompilationDump(artifacts / "dump", manifest)
    plan = read_plan(dump.read_script("lower_call_tir").main, dump.read_script("plan_memory").main, SIZES)
    ((block, (size, _)),) = plan.blocks.items()
    assert plan.calls == len(manifest.calls) and not plan.unknown and size is not None
    planned = [t for t in plan.tensors if t.block == block]
    assert len(planned) > 20 and max(t.offset + t.size for t in planned) <= size
    for n, a in enumerate(planned):
        for b in planned[:n]:
            at_once = a.first <= b.last and b.first <= a.last
            assert not at_once or a.offset + a.size <= b.offset or b.offset + b.size <= a.offset, (a, b)
    (logits,) = (t for t in plan.tensors if t.block is None)
    assert (logits.size, logits.last) == (50 * 4, plan.calls - 1)
    memory = section(page, "memory")
    assert len(list(memory.all("rect"))) == len(planned)
    assert max(plan.list_live_bytes(block)) <= size < sum(t.size for t in planned)


def test_code(
    page: Element, artifacts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = section(page, "code")
    for text in ("TensorIR before scheduling", "TensorIR as it is compiled", "Machine code"):
        assert sum(text in element.text for element in code.all("summary")) == len(
            lowering.load(artifacts / "out").manifest.kernels
        )
    assert "vfmadd" in code.text
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["inspect", str(artifacts / "out"), "--html", str(artifacts / "without.html")]) == 0
    without = Reader((artifacts / "without.html").read_text(encoding="utf-8")).root
    assert section(without, "code").text == (
        "CodeNot all machine code is shown: neither llvm-objdump nor objdump is installed (Debian: binutils)."
    )
    for name in ("phases", "attention", "memory"):
        assert "--dump-dir" in section(without, name).text
    assert "bench ARTIFACT --json > FILE" in section(without, "measurements").text


@pytest.mark.parametrize(
    "options, message",
    [
        (["--dim", "heads=3"], "no input has a symbolic dimension 'heads'"),
        (["--dim", "tokens=301"], "--dim tokens=301: the artifact was compiled for 1 to 300"),
        (["--dump", "other"], "'other' is the dump of another compilation"),
        (["--dump", "nothing"], "'nothing' is not a complete dump: it has no artifact.json"),
        (["--bench", "other.json"], "--bench other.json: it is of another artifact"),
        (["--bench", "decoder.onnx"], "--bench decoder.onnx: it cannot be read"),
    ],
)
def test_what_does_not_belong_to_it(
    artifacts: Path, hostile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(artifacts)
    if not Path("other").exists():
        Path("other").symlink_to(hostile / "dump")
        measured = json.loads(Path("bench.json").read_text())
        for call in measured["calls"]:
            call["kernel"]["flops"] = "7"
        Path("other.json").write_text(json.dumps(measured))
    assert main(["inspect", "out", "--html", "none.html", *options]) == 1
    assert f"]: {message}" in capsys.readouterr().err and not Path("none.html").exists()


def test_code_for_a_gpu(tmp_path: Path) -> None:
    """The machine code inside a library, the launches of each kernel, and why a kernel for Hopper is not used."""
    text = """
    <ir_version: 10, opset_import: ["" : 24]>
    model (float16[1, 2, S, 64] q, float16[1, 2, S, 64] k, float16[1, 2, S, 64] v) => (float16[1, 2, S, 64] y) {
      y = Attention <is_causal = 1> (q, k, v)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    out, dump, target = str(tmp_path / "out"), str(tmp_path / "dump"), "cuda:sm_80"
    assert main(["compile", str(tmp_path / "m.onnx"), "-o", out, "--dump-dir", dump, "--target", target]) == 0
    assert main(["inspect", out, "--html", str(tmp_path / "report.html"), "--dump", dump]) == 0
    page = Reader((tmp_path / "report.html").read_text(encoding="utf-8")).root
    titles = [element.text for element in section(page, "code").all("summary")]
    assert any(title.startswith("GPU code of attention_kernel") for title in titles)
    assert "HMMA.16816.F32" in section(page, "code").text
    assert "wgmmathe GPU is a Hopper" in section(page, "attention").text


def test_options_of_the_page_want_a_page(artifacts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(artifacts / "out"), "--dim", "batch=2"]) == 1
    assert "[argument.option_requires_other]" in capsys.readouterr().err


PROBE = """<script>
for (const each of document.querySelectorAll('details')) each.open = true;
const room = document.documentElement.clientWidth;
const inside = element => !element.closest('.wide, pre') && element.getBoundingClientRect().right > room + 0.5;
parent.postMessage({
  width: innerWidth, overflow: document.documentElement.scrollWidth - room,
  wide: [...document.querySelectorAll('body *')].filter(inside).map(e => e.tagName + '.' + e.className),
  sections: [...document.querySelectorAll('section')].filter(e => e.offsetHeight > 50).map(e => e.id),
  loaded: performance.getEntriesByType('resource').map(e => e.name)}, '*');
</script>"""

# A window cannot be as narrow as a telephone, a frame can.
FRAME = """<script>onmessage = event => { document.body.dataset.found = JSON.stringify(event.data); }</script>
<iframe src="probed.html" style="width: WIDTHpx; height: 900px; border: 0"></iframe>"""


@needs_browser
@pytest.mark.parametrize("which", ["artifacts", "hostile"])
def test_in_a_browser(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """No message, nothing loaded, and nothing wider than the window with everything unfolded. A script measures that,
    in a copy whose policy lets it."""
    text = (request.getfixturevalue(which) / "report.html").read_text(encoding="utf-8")

    def shown(name: str, page: str) -> str:
        (tmp_path / name).write_text(page, encoding="utf-8")
        return opened(tmp_path / name, tmp_path / "user")

    assert [element.attributes["id"] for element in Reader(shown("page.html", text)).root.all("section")] == SECTIONS
    probed = text.replace("img-src data:", "img-src data:; script-src 'unsafe-inline'")
    (tmp_path / "probed.html").write_text(probed.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    for width in (400, 1200):
        (body,) = Reader(shown("frame.html", FRAME.replace("WIDTH", str(width)))).root.all("body")
        report = json.loads(body.attributes["data-found"] or "")
        assert report == {"width": width, "overflow": 0, "wide": [], "sections": SECTIONS, "loaded": []}


@needs_browser
@pytest.mark.parametrize("length", [10, 40, 90, 150])
def test_no_table_is_clipped(length: int, artifacts: Path, tmp_path: Path) -> None:
    """At the widths of common screens, however long names of kernels are: all columns are seen without scrolling."""
    text = (artifacts / "report.html").read_text(encoding="utf-8")
    names = {kernel.name for kernel in lowering.load(artifacts / "out").manifest.kernels}
    for number, name in enumerate(sorted(names, key=len, reverse=True)):
        text = text.replace(f"<code>{name}</code>", f"<code>{'fused_matmul_' * (length // 13)}{number}</code>")
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    assert what_is_cut([tmp_path / "page.html"], (1280, 1400), ".wide", tmp_path) == {}

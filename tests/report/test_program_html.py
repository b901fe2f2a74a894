"""The page of a program is whole by itself, shows what the program says, and reads nothing that a name brings along."""

import base64
import hashlib
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.toy_program import toy_program
from tpplan.compiler.ir.layout import PARTIAL, REPLICATED, sharded
from tpplan.compiler.ir.program import Boundary, Program
from tpplan.cost.cluster import cluster_of
from tpplan.cost.estimates import Estimate, MemoryEstimate, StepEstimate, TimeSlice
from tpplan.cost.link_times import Group, collective_seconds
from tpplan.cost.traffic import module_traffic
from tpplan.report.program_diagram import mermaid, svg
from tpplan.report.program_html import html_page
from tpplan.report.program_picture import picture_of

H100 = cluster_of("h100")
TOY = toy_program()
PLAN = {"toy.yaml": "".join(f"line {number}: <b>&amp;</b>\n" for number in range(1, 11))}
BLOCK = "model.layers.0.self_attn"
LINE = (
    TimeSlice("compute", f"{BLOCK}.q_proj", "aten.mm.default", False, 0.0, 3e-5, 100),
    TimeSlice("communication", f"{BLOCK}.o_proj", "reduce-scatter", False, 3e-5, 1e-5, 200, 4e-6),
    TimeSlice("communication", BLOCK, "reduce-scatter", True, 4e-5, 1e-5, 200),
)
COST = Estimate(
    "h100", "toy", "LlamaForCausalLM", 4, 1, False, 3, 32, "adamw", "none", MemoryEstimate(400, 400, 2400, 900, 80),
    StepEstimate(3e-3, 1e-3, 1e-3, 0.0, 4e-3, LINE), 24_000.0, 0.31, True, 8000, None, ("links",), {},
)  # fmt: skip
HOSTILE = """</script></svg><img src=x onerror="alert('1')">"""


def hostile() -> Program:
    """A program whose every text has tags and quotes in it."""

    def named(name: str) -> str:
        return name.replace("self_attn", f"a{HOSTILE}\x01")

    modules = tuple(
        replace(
            m, name=named(m.name), kind=HOSTILE, origin=HOSTILE, style=m.style and HOSTILE,
            exits=tuple(replace(r, origin=f"{HOSTILE}:1", path=(HOSTILE,)) for r in m.exits),
        )
        for m in TOY.modules
    )  # fmt: skip
    parameters = tuple(replace(p, names=tuple(map(named, p.names))) for p in TOY.parameters)
    return replace(TOY, modules=modules, parameters=parameters, plan=HOSTILE, model=HOSTILE, axis=HOSTILE)


class Page(HTMLParser):
    """What a page has: its tags, their attributes, and whether they close as they open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.script = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("meta", "link", "br", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.script += data if self.open[-1:] == ["script"] else ""

    def all(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]


@pytest.mark.parametrize(
    "text",
    [
        html_page(TOY, COST, H100, PLAN),
        html_page(TOY, unpriced="in evaluation"),
        html_page(hostile(), COST, H100, {HOSTILE: HOSTILE}),
    ],
    ids=["priced", "bare", "hostile"],
)
def test_a_page_is_whole_by_itself_and_has_only_its_own_script(text: str) -> None:
    page = Page(text)
    assert Counter(page.all("id")).most_common(1)[0][1] == 1
    assert set(page.all("href")) <= {"data:,", *(f"#{key}" for key in page.all("id"))}
    assert not page.all("src") and "url(" not in text and "@import" not in text
    assert [tag for tag, _ in page.tags].count("script") == 1 and "img" not in {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    digest = base64.b64encode(hashlib.sha256(page.script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text and not re.search(r"\$\w", text)
    rows = {attributes["id"] for tag, attributes in page.tags if tag == "tr" and "id" in attributes}
    assert rows and set(page.all("data-to")) == rows and {f"{row}-told" for row in rows} <= set(page.all("id"))
    assert {line for line in page.all("data-line") if line} <= set(page.all("id"))


def test_a_collective_leads_to_its_plan_s_line_and_has_bytes_and_time() -> None:
    text = html_page(TOY, COST, H100, PLAN)
    page = Page(text)
    # Where the first layer differs, the others are told apart.
    assert Counter(page.all("data-line")) == {
        "plan0-4": 1, "plan0-5": 2, "plan0-6": 2, "plan0-8": 2
    }  # fmt: skip
    assert "line 5: &lt;b&gt;&amp;amp;&lt;/b&gt;" in text
    picture = picture_of(TOY, H100)
    sent = sum(c.count * cost.bytes for c in picture.crossings() for cost in c.passes)
    step = module_traffic(TOY.modules, TOY.size)
    assert sent == step.forward.total + step.backward.total
    gather = next(c for c in picture.crossings() if c.module.endswith("self_attn"))
    assert gather.passes[0].seconds == collective_seconds(H100, "all-gather", 3 * 32 * 64 * 4, Group.of(H100, 4))
    assert [cost.seconds for c in picture_of(TOY).crossings() for cost in c.passes].count(None) == 14
    slices = [
        attributes for tag, attributes in page.tags if tag == "rect" and "communication" in attributes.get("class", "")
    ]
    assert "4.0 µs of it beside products" in (slices[0]["aria-label"] or "")
    assert [attributes["data-to"] for attributes in slices] == [
        next(c.key for c in picture.crossings() if c.first == name) for name in (f"{BLOCK}.o_proj", BLOCK)
    ]


@pytest.mark.parametrize("program", [TOY, hostile()], ids=["toy", "hostile"])
def test_the_diagram_is_xml_and_as_wide_as_a_phone(program: Program) -> None:
    root = ElementTree.fromstring(svg(picture_of(program, H100)))
    assert int(root.attrib["width"]) <= 390
    assert {node.tag.rpartition("}")[2] for node in root.iter()} == {
        "svg",
        "title",
        "style",
        "rect",
        "path",
        "text",
        "g",
    }
    assert sum("data-to" in node.attrib for node in root.iter()) == 7
    boxes = [node.attrib for node in root.iter() if node.tag.endswith("rect")]
    assert all(
        float(b["x"]) >= 0 and float(b["x"]) + float(b["width"]) <= 360 and float(b["height"]) > 0 for b in boxes
    )


def test_numbers_are_of_what_they_are_said_to_be_of() -> None:
    shared = replace(COST, dp=4, fsdp=True)
    text = unescape(re.sub("<.*?>", " ", html_page(TOY, shared, H100, PLAN)))
    assert "each rank sends in a step over tp" in text and "collectives in a step over tp" in text
    assert "adamw, checkpointing none, fsdp 4:" in text


def test_a_rank_s_shapes_stand_beside_whole_ones() -> None:
    text = unescape(re.sub("<.*?>", " ", html_page(TOY, COST, H100, PLAN)))
    gathered = next(r for _, r in TOY.reshards() if str(r.forward) == "all-gather" and r.source == sharded(1))
    batch, length, width = gathered.shape
    own = f"({batch}, {length // TOY.size}, {width})"
    assert f"({batch}, {length}, {width}) {gathered.dtype}" in text
    assert text.count(f"S(1) {own} → R") >= 2  # in the table, and in what is told of a chosen one
    assert f"P → S(1) {own}" in text and f"R ({batch}" not in text and f"P ({batch}" not in text


def test_boxes_stand_in_the_order_of_calls_with_the_placements_at_their_edges() -> None:
    def edge(inward: bool, layout: object) -> Boundary:
        return Boundary(inward, ("x",), (), layout, (3, 32, 64), True)  # pyright: ignore[reportArgumentType]

    layers = [f"model.layers.{index}" for index in range(3)]
    boundaries = {"model.embed_tokens": (edge(False, PARTIAL),)}
    for name in layers:
        boundaries |= {f"{name}.input_layernorm": (edge(True, sharded(1)), edge(False, sharded(1)))}
        boundaries |= {f"{name}.self_attn": (edge(True, sharded(1)),)}
    program = replace(TOY, boundaries=boundaries)
    assert (
        "input_layernorm" in [m.name.rpartition(".")[2] for m in program.modules if m.name.startswith(layers[0])][-1:]
    )
    picture = picture_of(program)
    (first,) = [box for box in picture.boxes if box.full_name == layers[0]]
    assert [box.name for box in first.inside] == ["input_layernorm", "self_attn"]
    assert [(box.entering, box.leaving) for box in first.inside] == [("S(1)", "S(1)"), ("S(1)", "R")]
    (embedding,) = [box for box in picture.boxes if box.name == "model.embed_tokens"]
    assert (embedding.entering, embedding.leaving) == (str(REPLICATED), "P")


@pytest.mark.parametrize("program", [TOY, hostile()], ids=["toy", "hostile"])
def test_mermaid_has_each_box_and_collective_and_no_text_that_it_would_read(program: Program) -> None:
    text = mermaid(picture_of(program, H100))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "flowchart TD" and lines.count("end") == sum(line.startswith("subgraph") for line in lines) > 0
    labels = [label for line in lines for label in re.findall(r'"(.*?)"(?=[\]}|])', line)]
    assert len(labels) >= 14 and not [
        label for label in labels if re.search(r'[<>"`;&]', re.sub(r"<br/>|#\d+;", "", label))
    ]
    assert len({line for line in lines if line.startswith("class ")}) == 7


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_in_a_browser_it_loads_tells_sorts_and_filters(browser, width: int, scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(html_page(TOY, COST, H100, PLAN), encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    wrong, asked = [], []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    cue = page.evaluate("getComputedStyle(document.querySelector('.wide')).backgroundAttachment").split(", ")
    assert cue[:4] == ["local", "local", "scroll", "scroll"]  # a shade at an edge beyond which there are columns
    told, rows = page.locator("#told"), page.locator("#reshards tbody tr:visible")

    page.locator("svg.tp g[data-to]").nth(1).click()
    assert "reduce-scatter" in told.inner_text() and "toy.yaml:5" in told.inner_text() and "line 5" in told.inner_text()
    assert page.locator("li.on").inner_text().startswith("line 5") and page.locator("tr.on").count() == 1
    page.keyboard.press("Escape")
    assert page.locator(".on").count() == 0
    page.locator("svg.tp g[data-to]").nth(2).focus()
    page.keyboard.press("Enter")
    assert page.locator("li.on").inner_text().startswith("line 6")
    page.keyboard.press("Escape")

    heading = page.locator("#reshards th").nth(6)
    sent = "[...document.querySelectorAll('#reshards tbody tr')].map(row => Number(row.cells[6].dataset.v))"
    for order, reverse in (("ascending", False), ("descending", True)):
        heading.locator("button").click()
        found = page.evaluate(sent)
        assert heading.get_attribute("aria-sort") == order and found == sorted(found, reverse=reverse)
    page.locator("input[data-of=reshards]").fill("o_proj reduce")
    assert rows.count() == 2
    page.locator("input[data-of=reshards]").fill("")
    assert rows.count() == 7
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert wrong == [] and asked == [path.as_uri()]
    page.close()

"""docs/architecture.md is a way in: short, with each folder, each layer and each note; what the notes name is there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.house.layers import LAYERS, STAGES

ROOT = Path(__file__).parents[2]
DOCS, PACKAGE = ROOT / "docs", ROOT / "src" / "tpplan"
PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
NOTES = sorted((DOCS / "decisions").glob("*.md"))
PAGES = [*DOCS.glob("*.md"), *NOTES, *ROOT.glob("*.md")]
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 200


def test_the_page_has_a_row_for_each_folder_and_file() -> None:
    rows = "".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    for folder in (PACKAGE, PACKAGE / "compiler", PACKAGE / "runtime"):
        names = [f"`{path.parent.name}/`" for path in folder.glob("*/__init__.py")]
        assert names and not [name for name in names if name not in rows]
    files = [f"`{path.name}`" for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]
    assert not [name for name in files if name not in rows]
    beside = [f"`{path.name}`" for path in (PACKAGE / "compiler").glob("*.py") if path.stem != "__init__"]
    assert not [name for name in beside if name not in PAGE]


def test_the_layers_are_those_that_are_enforced() -> None:
    expected = [", ".join(row) for row in LAYERS if not row[0].startswith("__")]
    (shown,) = re.findall(r"```\n(cli  >.*?)```", PAGE, re.DOTALL)
    assert re.split(r"\s+>\s+", shown.strip()) == expected
    assert " > ".join(f"`{stage}`" for stage in STAGES if stage) in PAGE


def test_each_note_is_listed() -> None:
    assert not [path.name for path in NOTES if PAGE.count(f"](decisions/{path.name})") < 1]


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.stem)
def test_a_note_is_short_and_says_why_and_how_it_is_known(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    assert text.startswith(f"# {path.name[:3]}. ")
    assert "\n**Context.** " in text and "\n**Decision.** " in text
    assert "\n**Measured.** " in text or "\n**Held by** " in text


@pytest.mark.parametrize("path", [DOCS / "architecture.md", DOCS / "limits.md", *NOTES], ids=lambda path: path.stem)
def test_files_that_are_named_are_there(path: Path) -> None:
    folders = (PACKAGE, PACKAGE / "compiler", ROOT)
    known = {p.name for folder in (PACKAGE, ROOT / "tests") for p in folder.rglob("*.py")}
    named = re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8"))
    missing = [
        name
        for name in named
        if (not any((folder / name).exists() for folder in folders) if "/" in name else name not in known)
    ]
    assert not missing


@cache
def anchors(page: Path) -> frozenset[str]:
    """What GitHub and the site call a page's headings."""
    found: list[str] = []
    for title in re.findall(r"^#+ +(.+?) *$", _FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return frozenset(found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", _FENCED.sub("", path.read_text(encoding="utf-8"))):
        target, _, anchor = link.partition("#")
        there = path.parent / target if target else path
        assert "://" in target or there.exists(), link
        assert not anchor or "://" in target or anchor in anchors(there), link


def test_the_site_has_each_page_and_the_ways_in_link_it() -> None:
    index = (DOCS / "site" / "index.md").read_text(encoding="utf-8")
    ways_in = PAGE + (DOCS.parent / "README.md").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert f"\n../{page.stem}\n" in index, page
        assert page.stem == "architecture" or f"]({page.name})" in ways_in or f"](docs/{page.name})" in ways_in, page

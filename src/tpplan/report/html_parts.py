"""Parts of pages that load nothing: the whole, with its style and script; cards; tables to sort and filter.

`page.html` is the template, and `page.js` its script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template

Cell = tuple[str, float | None]
"""HTML, and the number that it is sorted by."""


def whole_page(title: str, header: str, main: str, style: str = "") -> str:
    """A page of these parts, which are HTML; `title` is text."""
    here = Path(__file__)
    script = here.with_name("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(here.with_name("page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title), header=header, main=main, style=style, script=script, script_hash=f"sha256-{digest}"
    )


def html_card(what: str, number: str) -> str:
    """A number that decides, and what it is."""
    return f'<div class="card"><b>{escape(number)}</b><span>{escape(what)}</span></div>'


def html_row(cells: Iterable[Cell], more: str = "") -> str:
    """A row of a table; `more` are attributes."""
    shown = "".join(
        f"<td>{text}</td>" if number is None else f'<td class="n" data-v="{number:.12f}">{text}</td>'
        for text, number in cells
    )
    return f"<tr{more}>{shown}</tr>"


def html_table(title: str, key: str, headings: Iterable[str], body: Iterable[str]) -> str:
    """A table that can be sorted by each column, and filtered by words."""
    heads = "".join(f'<th scope="col"><button type="button">{escape(text)}</button></th>' for text in headings)
    return (
        f'<h2>{title}</h2><p><label>Filter <input type="search" data-of="{key}" autocomplete="off"></label></p>'
        f'<div class="wide" tabindex="0" role="region" aria-label="{title}"><table id="{key}"><thead><tr>{heads}</tr>'
        f"</thead><tbody>{''.join(body)}</tbody></table></div>"
    )


__all__ = ["Cell", "html_card", "html_row", "html_table", "whole_page"]

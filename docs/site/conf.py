"""The site: docs as they are, README as its first page, and the API from docstrings. `make site` builds it, offline.

Sphinx with MyST reads the pages as GitHub does; furo loads nothing from elsewhere.
"""

from __future__ import annotations

from typing import Any

project, author = "tpplan", "The tpplan authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "site/index"
include_patterns = ["*.md", "decisions/*.md", "site/*.md"]
myst_heading_anchors = 4  # as on GitHub
autodoc_typehints = "none"  # signatures have them
default_role = "code"  # docstrings write `code` as Markdown does
html_theme, html_title = "furo", "tpplan"
html_copy_source = html_show_sphinx = False
html_extra_path = ["top"]  # index.html, which leads to the first page

# Pages outside of docs/ are included by pages of the site; what they link to outside of it is no page.
_MOVED = {
    "](../CHANGELOG.md)": "](site/changes.md)",
    "](CHANGELOG.md)": "](changes.md)",
    "](CONTRIBUTING.md)": "](contributing.md)",
    "[tutorials/](tutorials/)": "`docs/tutorials/`",
    "[plans/](plans)": "`plans/`",
    "[Apache-2.0](LICENSE)": "Apache-2.0",
}


def _with_moved(_: Any, *read: Any) -> None:
    (text,) = held = read[-1]
    for there, here in _MOVED.items():
        text = text.replace(there, here)
    held[0] = text


def setup(app: Any) -> None:
    """Have Sphinx ask for each text that it reads."""
    app.connect("source-read", _with_moved)
    app.connect("include-read", _with_moved)

"""From a plan file's bytes to nodes with places.

In: bytes. Out: nodes, or Stop once what's wrong has been collected. Nothing in a file is executed, resolved by tag or
expanded without bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from tpplan.plan.nodes import ListNode, MapNode, Node, ScalarNode, plain_scalar, shorten
from tpplan.plan.positions import SourceText, Span
from tpplan.plan.problems import Problems, Stop

MAX_BYTES: Final = 1024 * 1024
MAX_NODES: Final = 20_000
MAX_DEPTH: Final = 16

_PROPERTIES = re.compile(r"(?:[!&]\S*\s*)*")
_QUOTE_HELP = 'quote a pattern that begins with `*`, `{` or `&`: `"*.mlp": colwise`'


def decode(data: bytes, name: str, problems: Problems) -> SourceText:
    """The file's text, without a byte order mark; stops at bytes that aren't UTF-8 and at files that are too large."""
    if len(data) > MAX_BYTES:
        size = f"{len(data) / MAX_BYTES:.1f} MiB"
        help_text = "split the plan by `extends`"
        problems.add("TP015", f"the file is larger than 1 MiB ({size})", subject=name, help=help_text)
        raise Stop
    try:
        return SourceText.of(name, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        source = SourceText.of(name, before.decode("utf-8-sig", "replace"))
        at = source.span(offset := _length(source), offset)
        message = f"byte 0x{error.object[error.start]:02x} isn't UTF-8"
        raise problems.stop("TP017", message, at, label="not UTF-8", help="save the file as UTF-8") from None


def compose(source: SourceText, text: str, problems: Problems) -> Node | None:
    """The document's root; None for an empty document."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    parser: Any = YAML(typ="safe", pure=True)
    try:
        return _Composer(source, text, parser.parse(text), problems).document()
    except ReaderError as error:
        offset = int(getattr(error, "position", 0))
        at = source.span(offset, offset + 1)
        message = f"the character U+{ord(text[offset]):04X} isn't allowed in a YAML file"
        raise problems.stop("TP001", message, at, label="not allowed", help="remove the character") from None
    except MarkedYAMLError as error:
        raise _syntax_error(error, source, text, problems) from None
    except (YAMLError, ValueError, IndexError, AttributeError, TypeError, AssertionError, RecursionError) as error:
        raise problems.stop("TP001", f"the YAML can't be read: {shorten(str(error))}", source.span(0, 0)) from None


class _Composer:
    """Builds nodes from the parser's events, counting what aliases stand for."""

    def __init__(self, source: SourceText, text: str, events: Iterator[Any], problems: Problems) -> None:
        self.source = source
        self.text = text
        self.events = events
        self.problems = problems
        self.anchors: dict[str, Node] = {}
        self.total = 0

    def document(self) -> Node | None:
        """The only document's root."""
        root: Node | None = None
        documents = 0
        for event in self.events:
            kind = _kind(event)
            if kind == "DocumentStart":
                documents += 1
                if documents > 1:
                    message, help_text = "a second document begins here", "keep one document in a file"
                    raise self.problems.stop("TP001", message, self.span(event), help=help_text)
            elif kind not in ("StreamStart", "DocumentEnd", "StreamEnd"):
                root = self.node(event, 0)
        return root

    def span(self, event: Any) -> Span:
        """The event's place."""
        return self.source.span(event.start_mark.index, event.end_mark.index)

    def node(self, event: Any, depth: int) -> Node:
        """The node that begins with `event`."""
        if depth > MAX_DEPTH:
            message = f"more than {MAX_DEPTH} levels of nesting"
            raise self.problems.stop("TP016", message, self.span(event), help="a plan needs three")
        kind = _kind(event)
        if kind == "Alias":
            return self.alias(event)
        self.count(1, event)
        if getattr(event, "ctag", None) is not None:
            self.refuse_tag(event)
        if kind == "Scalar":
            node: Node = self.scalar(event)
        elif kind == "SequenceStart":
            node = self.sequence(event, depth)
        else:
            node = self.mapping(event, depth)
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def refuse_tag(self, event: Any) -> None:
        """Report a tag; the value is read as if it had none."""
        start = self.text.find("!", event.start_mark.index)
        tag = self.text[start:].split(maxsplit=1)[0]
        span = self.source.span(start, start + len(tag))
        message = f"tags aren't allowed, found `{shorten(tag)}`"
        self.problems.add("TP018", message, span, label="a tag", help="remove the tag")

    def count(self, size: int, event: Any) -> None:
        """Keep the number of nodes, aliases expanded, within bounds."""
        self.total += size
        if self.total > MAX_NODES:
            message = f"the file expands to more than {MAX_NODES:,} values once its aliases are expanded"
            raise self.problems.stop("TP016", message, self.span(event), help="use patterns instead of repeating rules")

    def alias(self, event: Any) -> Node:
        """The node that an alias stands for."""
        found = self.anchors.get(event.anchor)
        if found is None:
            span = self.span(event)
            message = f"`*{event.anchor.rstrip(':')}` reads as a YAML alias, and nothing is anchored by that name"
            raise self.problems.stop("TP001", message, span, label="unknown alias", help=_QUOTE_HELP)
        self.count(found.size, event)
        return found

    def scalar(self, event: Any) -> ScalarNode:
        """A scalar; only a plain one can be anything but text."""
        text = str(event.value)
        end = event.end_mark.index
        start = event.start_mark.index
        if (event.anchor or event.ctag) and (properties := _PROPERTIES.match(self.text, start, end)):
            start = properties.end()
        return ScalarNode(text, plain_scalar(text) if event.implicit[0] else text, self.source.span(start, end))

    def sequence(self, start: Any, depth: int) -> ListNode:
        """A list."""
        items: list[Node] = []
        for event in self.events:
            if _kind(event) == "SequenceEnd":
                span = self.source.span(start.start_mark.index, event.end_mark.index)
                return ListNode(tuple(items), span, size=1 + sum(item.size for item in items))
            items.append(self.node(event, depth + 1))
        raise AssertionError("the parser closes every list")

    def mapping(self, start: Any, depth: int) -> MapNode:
        """A mapping; a second value for a key is reported and dropped."""
        entries: dict[str, tuple[ScalarNode, Node]] = {}
        for event in self.events:
            if _kind(event) == "MappingEnd":
                span = self.source.span(start.start_mark.index, event.end_mark.index)
                size = 1 + sum(key.size + value.size for key, value in entries.values())
                return MapNode(tuple(entries.values()), span, size=size)
            key = self.node(event, depth + 1)
            value = self.node(next(self.events), depth + 1)
            if not isinstance(key, ScalarNode):
                self.problems.add("TP004", "a key has to be text", key, label="not text", help=_QUOTE_HELP)
            elif key.text in entries:
                self.duplicate(key, entries[key.text][0])
            else:
                entries[key.text] = (key, value)
        raise AssertionError("the parser closes every mapping")

    def duplicate(self, key: ScalarNode, first: ScalarNode) -> None:
        """Report a key that stands twice."""
        line = first.span.start.line if first.span else 0
        self.problems.add(
            "TP002",
            f"`{shorten(key.text)}` appears twice in this mapping, first in line {line}",
            key,
            label="again here",
            help="keep one of the two",
            notes=(f"the first is at {first.span}",),
        )


def _kind(event: Any) -> str:
    return type(event).__name__.removesuffix("Event")


def _length(source: SourceText) -> int:
    return source.starts[-1] + len(source.lines[-1])


def _syntax_error(error: Any, source: SourceText, text: str, problems: Problems) -> Stop:
    mark = error.problem_mark or error.context_mark
    offset = min(mark.index, len(text)) if mark is not None else 0
    problem = shorten(str(error.problem or error.context or "not YAML"), 120)
    line = source.lines[source.position(offset).line - 1]
    help_text = None
    if "\\t" in problem or line.startswith("\t"):
        help_text = "indent with spaces; YAML allows no tabs there"
    elif line.lstrip().startswith(("*", "{", "&")):
        help_text = _QUOTE_HELP
    elif "mapping values are not allowed" in problem:
        help_text = "check the indentation, and quote a value that holds a colon"
    elif "<stream end>" in problem:
        help_text = "close the bracket or quote that was opened"
    at = source.span(offset, min(offset + 1, len(text)))
    context = f" {error.context}" if error.context and error.problem else ""
    return problems.stop("TP001", f"{problem}{context}", at, **({"help": help_text} if help_text else {}))

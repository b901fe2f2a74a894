"""GPUs in nodes, and how fast they compute and exchange: built in, or from a user's YAML file.

in:  a name such as `h100`, or the path of a file
out: `Cluster`

A file names what it differs in from a built-in one:

    like: h100
    title: our nodes
    in_node: 4
    network: 12.5e9

Every number is an assumption, which `Cluster.assumptions` lists.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tpplan.cost.cost_errors import CostError, unknown
from tpplan.plan import PlanError
from tpplan.plan.nodes import ListNode, MapNode, Node, ScalarNode, describe
from tpplan.plan.positions import Span
from tpplan.plan.problems import Problems, Stop
from tpplan.plan.yaml_source import MAX_BYTES, compose, decode

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
DTYPES = ("bfloat16", "float16", "tf32", "float32", "float64", "fp8", "int8")
_BY_RANKS = (2, 4, 8)
ByRanks = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal GPUs in equal nodes.

    Attributes:
        name, title: what it is.
        memory: bytes of a GPU.
        memory_bandwidth: bytes a second of a GPU's memory.
        flops: FLOPs a second of products, by dtype; dense.
        processors: of a GPU: a product's tiles are spread over them.
        in_node: GPUs in a node.
        link: bytes a second that a GPU sends inside of its node, while it receives as much.
        network: the same to other nodes; 400 Gb/s are 50e9.
        latency: α, seconds before a collective's first byte, by ranks [2, 4, 8].
        efficiency: the share of `link` that large collectives reach (bus bandwidth), by ranks [2, 4, 8].
        network_latency: seconds for each node that a collective spans beyond the first.
        network_efficiency: the share of `network` that is reached.
        product_efficiency: the share of the peak that large products reach.
        attention_efficiency: the share of the peak that a fused kernel of attention reaches.
        memory_efficiency: the share of `memory_bandwidth` that kernels reach which memory bounds.
        product_start, kernel: seconds that a product, and any other kernel, takes beside its work: start and tail.
        launch: seconds of the host for each kernel, if it isn't compiled.
        sustained: the share of these rates that a training run keeps: power limits, NCCL's kernels beside, gaps.
        usable: the share of `memory` that tensors may take; the rest is the context, the allocator's gaps, NCCL.
        guesses: what rests on no figure of its own.
    """

    name: str
    title: str
    memory: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    processors: int
    in_node: int
    link: float
    network: float
    latency: Mapping[str, ByRanks]
    efficiency: Mapping[str, ByRanks]
    network_latency: float = 8e-6
    network_efficiency: float = 0.9
    product_efficiency: float = 0.82
    attention_efficiency: float = 0.4
    memory_efficiency: float = 0.85
    product_start: float = 5e-6
    kernel: float = 2.5e-6
    launch: float = 5e-6
    sustained: float = 0.7
    usable: float = 0.92
    guesses: tuple[str, ...] = field(default=())

    @property
    def assumptions(self) -> dict[str, object]:
        """Every number, by name."""
        return json.loads(json.dumps(asdict(self)))

    def by_ranks(self, values: ByRanks, ranks: int) -> float:
        """What `latency` or `efficiency` is on so many ranks of a node: that of the next power of two in the list."""
        return next((value for n, value in zip(_BY_RANKS, values, strict=True) if ranks <= n), values[-1])


def cluster_of(source: str | os.PathLike[str] | Cluster) -> Cluster:
    """A built-in cluster by name, or that of a YAML file.

    Raises:
        CostError: TP220, there is neither.
        PlanError: TP221, the file has mistakes.
    """
    if isinstance(source, Cluster):
        return source
    text = os.fspath(source)
    if text in built_in():
        return _made(text, {})
    data, problems = _file(text), Problems()
    made: Cluster | None = None
    try:
        source_text = decode(data, text, problems)
        root = compose(source_text, data.decode("utf-8-sig"), problems)
        made = _read(root or source_text.span(0, 0), Path(text), problems)
    except Stop:
        pass
    if problems.failed or made is None:
        raise PlanError(replace(found, code="TP221") for found in problems.diagnostics)
    return made


def _file(text: str) -> bytes:
    path = Path(text)
    try:
        if path.is_dir():
            raise _unreadable(f"`{text}` is a folder, not a topology file", "name a YAML file in it")
        if path.is_file():
            with path.open("rb") as stream:
                return stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise _unreadable(
            f"the topology file `{text}` can't be read: {why}", "check its name and permissions"
        ) from None
    if len(path.parts) > 1 or path.suffix:
        raise _unreadable(f"there is no topology file `{text}`", "name a YAML file, or a GPU by `gpu`")
    raise unknown("GPU", text, built_in(), "or give the YAML file of a topology")


def _unreadable(message: str, way_out: str) -> CostError:
    return CostError.of("TP220", message, help=way_out)


@cache
def built_in() -> dict[str, dict[str, Any]]:
    """What is built in, as data."""
    return tomllib.loads(Path(__file__).with_name("clusters.toml").read_text(encoding="utf-8"))


def _made(name: str, changes: Mapping[str, Any]) -> Cluster:
    held = dict(built_in()[name])
    base = held.pop("like", None)
    while base is not None:
        under = dict(built_in()[base])
        base = under.pop("like", None)
        held = {**under, **held}
    merged: dict[str, Any] = {"name": name, **held, **changes}
    for table in ("flops", "latency", "efficiency"):
        rows: dict[str, Any] = {**held[table], **changes.get(table, {})}
        merged[table] = {key: tuple(row) if isinstance(row, list) else row for key, row in rows.items()}  # pyright: ignore
    merged["guesses"] = tuple(merged["guesses"])
    return Cluster(**merged)


_NUMBERS = {
    "memory", "memory_bandwidth", "processors", "in_node", "link", "network", "network_latency", "network_efficiency",
    "product_efficiency", "product_start", "attention_efficiency", "memory_efficiency", "kernel", "launch",
    "sustained", "usable",
}  # fmt: skip
_WHOLE = {"memory", "processors", "in_node"}
_SHARES = {
    "network_efficiency",
    "product_efficiency",
    "attention_efficiency",
    "memory_efficiency",
    "sustained",
    "usable",
}
_UNITS = {
    "bytes": ("memory",),
    "bytes a second": ("memory_bandwidth", "link", "network"),
    "seconds": ("network_latency", "product_start", "kernel", "launch"),
}
_KEYS = ("like", "title", *sorted(_NUMBERS), "flops", "latency", "efficiency")


def _read(root: Node | Span, path: Path, problems: Problems) -> Cluster | None:
    if not isinstance(root, MapNode):
        raise problems.stop("TP221", "a topology has to be a mapping", root, help="begin with `like: h100`")
    base, changes = "h100", dict[str, Any]()
    for key, value in root.entries:
        if key.text not in _KEYS:
            _wrong(problems, key, f"`{key.text}` isn't a key of a topology", f"keys are {', '.join(_KEYS)}")
        elif key.text == "like":
            base = value.text if isinstance(value, ScalarNode) else ""
            if base not in built_in():
                told = (
                    f"`{base}` isn't built in" if base else f"`like` has to be a GPU's name, and is {describe(value)}"
                )
                _wrong(problems, value, told, f"built in are {', '.join(built_in())}")
                base = "h100"
        elif key.text == "title":
            changes["title"] = value.text if isinstance(value, ScalarNode) else ""
            if not changes["title"]:
                _wrong(
                    problems, value, f"`title` has to be a text, and is {describe(value)}", "write `title: our nodes`"
                )
        elif key.text in _NUMBERS:
            changes[key.text] = _number(key.text, value, problems)
        else:
            changes[key.text] = _table(key.text, value, problems)
    if problems.failed:
        return None
    made = _made(base, changes)
    return replace(made, name=path.stem, guesses=tuple(g for g in made.guesses if "links" not in g))


def _number(name: str, node: Node, problems: Problems) -> float | int:
    number = _positive(node)
    least = "a share between 0 and 1" if name in _SHARES else f"a {'whole ' * (name in _WHOLE)}number above 0"
    if number <= 0 or (name in _SHARES and number > 1) or (name in _WHOLE and number % 1):
        unit = next((f"{unit}, such as " for unit, names in _UNITS.items() if name in names), "")
        _wrong(
            problems, node, f"`{name}` has to be {least}, and is {describe(node)}",
            f"write {unit}`{name}: {_example(name)}`",
        )  # fmt: skip
        return 1
    return int(number) if name in _WHOLE else float(number)


def _example(name: str) -> str:
    held = getattr(_made("h100", {}), name)
    return f"{held:g}" if isinstance(held, float) else str(held)


def _table(name: str, node: Node, problems: Problems) -> dict[str, Any]:
    known = DTYPES if name == "flops" else COLLECTIVES
    if not isinstance(node, MapNode):
        _wrong(problems, node, f"`{name}` has to be a mapping", f"its keys are {', '.join(known)}")
        return {}
    found: dict[str, Any] = {}
    for key, value in node.entries:
        if key.text not in known:
            _wrong(problems, key, f"`{key.text}` isn't a key of `{name}`", f"its keys are {', '.join(known)}")
        elif name == "flops":
            found[key.text] = float(_positive(value)) or _wrong(
                problems, value, f"`{key.text}` has to be FLOPs a second, and is {describe(value)}",
                "write `bfloat16: 989e12`",
            )  # fmt: skip
        else:
            items = [_positive(item) for item in value.items] if isinstance(value, ListNode) else []
            least, most = ("shares between 0 and 1", 1) if name == "efficiency" else ("numbers above 0", math.inf)
            if len(items) != len(_BY_RANKS) or not all(0 < item <= most for item in items):
                _wrong(problems, value, f"`{key.text}` has to be a list of three {least}, on 2, 4 and 8 ranks",
                       f"write `{key.text}: {list(built_in()['h100'][name][key.text])}`")  # fmt: skip
            else:
                found[key.text] = items
    return found


def _positive(node: Node) -> float:
    """The number above 0 that stands there; 0 if none does."""
    value = node.value if isinstance(node, ScalarNode) else None
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
    return number if 0 < number < math.inf else 0


def _wrong(problems: Problems, node: Node | Span, message: str, way_out: str) -> None:
    problems.add("TP221", message, node, help=way_out)


__all__ = ["COLLECTIVES", "Cluster", "built_in", "cluster_of"]

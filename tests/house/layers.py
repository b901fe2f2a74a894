"""The house rules on who may import what, read off the syntax trees of src/tpplan.

Every check takes the folder of the package and returns its findings as `file:line: what is wrong`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

# Top to bottom. A layer imports from layers below it, never from its own line or above.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("__init__",),
    ("bench", "demo"),
    ("pretrained",),
    ("api",),
    ("process",),
    ("forecast",),
    ("calls",),
    ("report", "parity"),
    ("asked",),
    ("served",),
    ("inputs", "hf", "training"),
    ("suggest",),
    ("initialize",),
    ("generation",),
    ("checkpoint", "loss"),
    ("rehearsal",),
    ("runtime",),
    ("compiler",),
    ("state",),
    ("ops",),
    ("cost",),
    ("kernels",),
    ("ambience", "taken_models"),
    ("compat",),
    ("plan",),
    ("progress",),
)
# The same inside of the compiler; "" is for the files beside its folders.
STAGES = ("", "emit", "explain", "check", "place", "rewrite", "bind", "rules", "trace", "ir")
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# The one file that may use torch's private names, and the layers that may use this file.
COMPAT = "compat"
COMPAT_USERS = frozenset(
    {"bench", "calls", "parity", "suggest", "initialize", "checkpoint", "rehearsal", "runtime", "compiler", "kernels"}
    | {"ambience", "state", "ops", "hf", "forecast"}
)
_FOR_VERSIONS = re.compile(r"\bFor (every torch|torch (before|since) 2\.\d+)\.$")
# Operators are data: the underscore of `torch.ops.aten._softmax` is part of a name that a trace holds.
OPERATOR_PREFIX = "torch.ops.aten."

# A report renders results; it doesn't compute them.
REPORT_IMPORTS = (
    "tpplan.report",
    "tpplan.compiler.ir.program",
    "tpplan.compiler.ir.layout",
    "tpplan.cost",
    "tpplan.plan",
)

# What `suggest` asks of the compiler goes through one module; plain data and the compilation itself are free to use.
SUGGEST_IMPORTS = (
    "tpplan.compiler.queries",
    "tpplan.compiler.ir",
    "tpplan.compiler.request",
    "tpplan.compiler.pipeline",
)

TORCH_FREE = ("tpplan.plan", "tpplan.report.diagnostics")
HEAVY_PACKAGES = frozenset({"torch", "triton", "transformers", "safetensors", "numpy"})

# All that changes a user's module stands in runtime/lower.py; what runs before or beside it only looks.
MUTATION_FREE = frozenset({"cli", "pretrained", "hf", "api", "report", "parity", "suggest", "compiler", "cost", "plan"})
MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
MODULE_MUTATORS = frozenset({"register_parameter", "register_buffer", "register_module", "add_module", "set_submodule"})
TABLE_MUTATORS = frozenset({"update", "pop", "popitem", "clear", "setdefault", "__setitem__", "__delitem__"})


@dataclass(frozen=True)
class Import:
    """One imported name: `from tpplan.plan import Plan` is (tpplan.plan.Plan, bound to Plan)."""

    target: str
    bound: str
    bound_target: str
    line: int
    typing_only: bool


@dataclass(frozen=True)
class Source:
    """One file of the package."""

    path: Path
    package: Path

    @cached_property
    def module(self) -> str:
        parts = self.path.relative_to(self.package.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)

    @cached_property
    def layer(self) -> str:
        return self.module.split(".")[1]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), filename=str(self.path))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self))

    def at(self, line: int, message: str) -> str:
        return f"{self.path.relative_to(self.package.parent)}:{line}: {message}"


def sources(package: Path) -> list[Source]:
    return [_source(path, package, path.stat().st_mtime_ns) for path in sorted(package.rglob("*.py"))]


@cache
def _source(path: Path, package: Path, changed: int) -> Source:
    """Read once for all checks, unless it has changed."""
    return Source(path, package)


def upward_imports(package: Path) -> list[str]:
    """Imports that don't point to a lower layer."""
    findings: list[str] = []
    for source in sources(package):
        if source.layer not in RANK:
            findings.append(source.at(1, f"`{source.layer}` is in no layer; give it a place in LAYERS"))
            continue
        for name in source.imports:
            target = _layer_of(name.target)
            if name.typing_only or target is None or target == source.layer:
                continue
            if target not in RANK:
                findings.append(source.at(name.line, f"imports {name.target}, and `{target}` is in no layer"))
            elif RANK[target] <= RANK[source.layer]:
                findings.append(source.at(name.line, f"`{source.layer}` imports {name.target}, which isn't below it"))
    return findings


def upward_stages(package: Path) -> list[str]:
    """Imports inside of the compiler that don't point to an earlier stage."""
    findings: list[str] = []
    for source in sources(package):
        if source.layer != "compiler":
            continue
        own = _stage_of(f"{source.module}.")
        for name in source.imports:
            if name.typing_only or not name.target.startswith("tpplan.compiler."):
                continue
            target = _stage_of(name.target)
            if STAGES.index(target) < STAGES.index(own):
                findings.append(source.at(name.line, f"stage `{own}` imports {name.target}, which isn't below it"))
    return findings


def unknown_stages(package: Path) -> list[str]:
    """Folders of the compiler that have no place in STAGES."""
    folders = sorted(path.name for path in (package / "compiler").iterdir() if (path / "__init__.py").is_file())
    return [f"compiler/{name} has no place in STAGES" for name in folders if name not in STAGES]


def _stage_of(target: str) -> str:
    """The folder of a name below tpplan.compiler; "" for a file beside the folders."""
    stage = target.split(".")[2]
    return stage if stage in STAGES else ""


def compat_outsiders(package: Path) -> list[str]:
    """Imports of compat from a layer that should have no need of torch's private names."""
    return [
        source.at(name.line, f"`{source.layer}` imports tpplan.{COMPAT}, meant for {', '.join(sorted(COMPAT_USERS))}")
        for source in sources(package)
        for name in source.imports
        if _layer_of(name.target) == COMPAT and source.layer not in COMPAT_USERS | {COMPAT}
    ]


def unversioned_compat(package: Path) -> list[str]:
    """Public functions and classes of compat whose docstrings don't end with the versions of torch that need them."""
    return [
        source.at(node.lineno, f"the docstring of `{node.name}` doesn't end with `For every torch.` or the like")
        for source in sources(package)
        if source.layer == COMPAT
        for node in source.tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
        if not _FOR_VERSIONS.search(ast.get_docstring(node) or "")
    ]


def report_outsiders(package: Path) -> list[str]:
    """What the report takes from elsewhere than the plan and the compiler's output."""
    return [
        source.at(name.line, f"`report` imports {name.target}; it may use {', '.join(REPORT_IMPORTS[1:])}")
        for source in sources(package)
        if source.layer == "report"
        for name in source.imports
        if _layer_of(name.target) is not None and not name.typing_only and not _inside(name.target, REPORT_IMPORTS)
    ]


def suggest_outsiders(package: Path) -> list[str]:
    """What `suggest` takes from inside of the compiler, past its queries."""
    return [
        source.at(name.line, f"`suggest` imports {name.target}; it may use {', '.join(SUGGEST_IMPORTS)}")
        for source in sources(package)
        if source.layer == "suggest"
        for name in source.imports
        if _layer_of(name.target) == "compiler" and not _inside(name.target, SUGGEST_IMPORTS)
    ]


def private_torch_names(package: Path) -> list[str]:
    """Uses of torch's private names outside compat, for typing or not: a name that goes breaks either."""
    findings: list[str] = []
    for source in sources(package):
        if source.layer == COMPAT:
            continue
        torch_names = {name.bound: name.bound_target for name in source.imports if _is_torch(name.bound_target)}
        seen = [(name.line, name.target) for name in source.imports if _is_torch(name.target)]
        seen += [(line, chain) for line, chain in _attribute_chains(source.tree, torch_names)]
        findings += [
            source.at(line, f"{chain} is private to torch; tpplan/{COMPAT}.py is the place for it")
            for line, chain in sorted(set(seen))
            if _has_private_part(chain)
        ]
    return findings


def torch_in_torch_free(package: Path) -> list[str]:
    """Imports of torch and the like by what must answer without the second that importing torch takes."""
    return [
        source.at(name.line, f"{source.module} imports {name.target}, and must stay free of torch")
        for source in sources(package)
        if _is_torch_free(source.module)
        for name in source.imports
        if not name.typing_only and name.target.partition(".")[0] in HEAVY_PACKAGES
    ]


def mutations(package: Path) -> list[str]:
    """Writes to a module's class, parameters, buffers or children outside the one place for them."""
    return [
        source.at(line, f"{what}: only tpplan/runtime/lower.py may change the user's module")
        for source in sources(package)
        if source.layer in MUTATION_FREE
        for line, what in _mutations(source.tree)
    ]


def _layer_of(target: str) -> str | None:
    parts = target.split(".")
    if parts[0] != "tpplan":
        return None
    return parts[1] if len(parts) > 1 else "__init__"


def _inside(target: str, modules: tuple[str, ...]) -> bool:
    return any(target == module or target.startswith(f"{module}.") for module in modules)


def _is_torch_free(module: str) -> bool:
    plan, diagnostics = TORCH_FREE
    return _inside(module, (plan,)) or module.startswith(diagnostics)


def _is_torch(target: str) -> bool:
    return target.partition(".")[0] == "torch"


def _has_private_part(chain: str) -> bool:
    if chain.startswith(OPERATOR_PREFIX):
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in chain.split("."))


def _imports(source: Source) -> Iterator[Import]:
    typing_only = _typing_only_lines(source.tree)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                bound_target = alias.name if alias.asname else bound
                yield Import(alias.name, bound, bound_target, node.lineno, node.lineno in typing_only)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(source, node)
            for alias in node.names:
                target = _submodule_or_export(source, origin, alias.name)
                full_name = f"{origin}.{alias.name}"
                bound = alias.asname or alias.name
                yield Import(target, bound, full_name, node.lineno, node.lineno in typing_only)


def _origin(source: Source, node: ast.ImportFrom) -> str:
    """The absolute name of the module that a `from` import names."""
    if node.level == 0:
        return node.module or ""
    package = source.path.parent.relative_to(source.package.parent).parts
    base = package[: len(package) - node.level + 1]
    return ".".join((*base, node.module) if node.module else base)


def _submodule_or_export(source: Source, origin: str, name: str) -> str:
    """`from tpplan import plan` takes a submodule; `from tpplan import Plan` what the package exports."""
    if origin != "tpplan":
        return f"{origin}.{name}"
    is_submodule = (source.package / name).is_dir() or (source.package / f"{name}.py").is_file()
    return f"{origin}.{name}" if is_submodule else origin


def _typing_only_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for statement in node.body:
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def _attribute_chains(tree: ast.Module, names: dict[str, str]) -> Iterator[tuple[int, str]]:
    """`dist.tensor._ops` as torch.distributed.tensor._ops, where `dist` was imported as torch.distributed."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        parts: list[str] = []
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            parts.append(root.attr)
            root = root.value
        # Only the shortest private chain counts, so that `torch._C._jit` is found once, as `torch._C`.
        shortest = parts[0].startswith("_") and not any(part.startswith("_") for part in parts[1:])
        if shortest and isinstance(root, ast.Name) and root.id in names:
            yield node.lineno, ".".join((names[root.id], *reversed(parts)))


def _mutations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            for target in _targets(node):
                if _is_class(target) or _is_table_entry(target):
                    yield node.lineno, f"writes {ast.unparse(target)}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            receiver = node.func.value
            # A module that registers its own parameters changes nobody else's.
            own = isinstance(receiver, ast.Name) and receiver.id == "self"
            if (node.func.attr in MODULE_MUTATORS and not own) or (
                node.func.attr in TABLE_MUTATORS and _is_module_table(receiver)
            ):
                yield node.lineno, f"calls {ast.unparse(node.func)}"
        elif isinstance(node, ast.Call) and _sets_class(node):
            yield node.lineno, f"calls {ast.unparse(node)}"


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete) -> Iterator[ast.expr]:
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _is_class(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "__class__"


def _is_table_entry(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and _is_module_table(node.value)


def _is_module_table(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in MODULE_TABLES


def _sets_class(node: ast.Call) -> bool:
    return (
        isinstance(node.func, ast.Name)
        and node.func.id == "setattr"
        and len(node.args) == 3
        and isinstance(node.args[1], ast.Constant)
        and node.args[1].value == "__class__"
    )

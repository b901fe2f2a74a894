"""Bodies made up at random, which take the features of a projection apart and put them together again."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WIDTH, FEATURES, BATCH, LENGTH = 8, 48, 2, 4


class Body(nn.Module):
    """A projection, and what is done with it."""

    def __init__(self, lines: list[str], contracted: int | None) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, FEATURES)
        self.out = nn.Identity() if contracted is None else nn.Linear(contracted, WIDTH)
        self.lines = "\n".join(lines)
        self.code = compile(self.lines, "body", "exec")

    def forward(self, x: Tensor) -> Tensor:
        names = {"h0": self.project(x), "torch": torch}
        exec(self.code, names)
        return self.out(names["made"])


@dataclass
class Writer:
    """Writes a body line by line, and runs each line to know what may come next."""

    rng: random.Random
    names: dict[str, object]
    lines: list[str]
    gentle: bool

    def of(self, *kinds: str) -> str:
        return self.rng.choice(kinds)

    def tensors(self) -> list[str]:
        return [name for name, held in self.names.items() if isinstance(held, Tensor)]

    def shape(self, name: str) -> torch.Size:
        return self.names[name].shape  # pyright: ignore

    def add(self, text: str, count: int = 1) -> bool:
        """Append a line that makes so many tensors, if it runs."""
        first = len(self.tensors())
        made = ", ".join(f"h{first + n}" for n in range(count))
        line = f"{made}{',' if count == 1 and text.startswith('*') else ''} = {text.removeprefix('*')}"
        names = dict(self.names)
        try:
            exec(line, names)
        except (RuntimeError, IndexError, ValueError):
            return False
        tensors = [names[f"h{first + n}"] for n in range(count)]
        if any(not 0 < t.numel() <= 4096 for t in tensors):  # pyright: ignore
            return False
        self.names |= dict(zip((f"h{first + n}" for n in range(count)), tensors, strict=True))
        self.lines.append(line)
        return True

    def dim(self, name: str) -> int:
        """One of the dims, the last ones more often, in either spelling."""
        rank = len(self.shape(name))
        dim = max(self.rng.randrange(rank), self.rng.randrange(rank))
        if self.gentle and rank > 3:
            dim = self.rng.choice([d for d in range(rank) if d != 2])
        return dim - (rank if self.rng.random() < 0.5 else 0)

    def factors(self, size: int) -> list[int]:
        first = self.rng.choice([n for n in range(1, size + 1) if size % n == 0])
        rest = size // first
        if self.rng.random() < 0.3:
            second = self.rng.choice([n for n in range(1, rest + 1) if rest % n == 0])
            found = [first, second, rest // second]
        else:
            found = [first, rest]
        if self.rng.random() < 0.5:
            found[self.rng.randrange(len(found))] = -1
        return found

    def pieces(self, size: int) -> list[int]:
        cuts = sorted(self.rng.sample(range(1, size), min(size - 1, self.rng.choice((1, 2)))))
        return [end - start for start, end in zip((0, *cuts), (*cuts, size), strict=True)]

    def write(self, name: str, entries: str) -> None:
        """Write to entries of a copy."""
        if not self.add(f"{name}.clone()"):
            return
        line = f"{self.tensors()[-1]}[{self.of(entries, '..., 0', '..., -1', '..., 1:')}] {self.of('=', '*=', '+=')} 2"
        with suppress(RuntimeError, IndexError):
            exec(line, dict(self.names))
            self.lines.append(line)

    def heads(self) -> None:
        """View what the projection makes, or each of its packs, as heads."""
        packs = self.rng.choice(([], [], [24, 12, 12], [16, 16, 16]))
        if packs:
            self.add(f"h0.split({packs}, -1)", 3)
        count = self.rng.choice((4, 8)) if packs == [16, 16, 16] else 4
        for name in self.tensors()[-3 if packs else 0 :]:
            self.add(f"{name}.view({BATCH}, {LENGTH}, {self.of('-1', str(count))}, {self.shape(name)[-1] // count})")

    def step(self) -> None:
        """Try one more line."""
        rng, name = self.rng, self.rng.choice(self.tensors()[-4:])
        shape = self.shape(name)
        if not shape:
            return
        dim = self.dim(name)
        size = shape[dim]
        kind = rng.choice((
            "unflatten", "unflatten", "view", "flatten", "split", "chunk", "unbind", "select", "slice", "every",
            "narrow", "movedim", "transpose", "permute", "unsqueeze", "squeeze", "expand", "stack", "cat", "cat",
            "pointwise", "pointwise", "index", "index_select", "flip", "roll", "repeat", "write", "sum",
            "T", "einsum", "complex", "gather", "trapezoid", "diff", "tile", "stride", "contiguous", "shape",
        ))  # fmt: skip
        at, other = rng.randrange(-size, size), rng.choice(self.tensors()[-5:])
        before = ":, " * (dim % len(shape))
        match kind:
            case "unflatten":
                self.add(f"{name}.unflatten({dim}, {tuple(self.factors(size))})")
            case "view":
                sizes = [*shape[: dim % len(shape)], *self.factors(size), *shape[dim % len(shape) + 1 :]]
                self.add(f"{name}.{self.of('view', 'reshape')}({', '.join(map(str, sizes))})")
            case "flatten":
                self.add(f"{name}.flatten({rng.randrange(len(shape))})")
            case "split":
                pieces = self.pieces(size) if size > 1 else [1]
                self.add(f"*{name}.split({pieces}, {dim})", len(pieces))
            case "chunk":
                count = rng.choice((2, 3, 4))
                self.add(f"*{name}.chunk({count}, {dim})", len(self.names[name].chunk(count, dim)))  # pyright: ignore
            case "unbind" if size <= 6:
                self.add(f"*{name}.unbind({dim})", size)
            case "select":
                self.add(f"{name}.select({dim}, {at})")
            case "slice":
                start, end = rng.randrange(-size, size), rng.randrange(-size, size + 2)
                self.add(f"{name}[{before}{self.of('', str(start))}:{self.of('', str(end))}]")
            case "every":
                self.add(f"{name}[{before}{self.of('', '0', '1')}::{self.of('2', '3')}]")
            case "narrow":
                length = rng.randrange(1, size + 1)
                self.add(f"{name}.narrow({dim}, {rng.randrange(size - length + 1)}, {length})")
            case "movedim" | "transpose":
                self.add(f"{name}.{kind}({dim}, {self.dim(name)})")
            case "permute":
                self.add(f"{name}.permute({rng.sample(range(len(shape)), len(shape))})")
            case "unsqueeze":
                self.add(f"{name}.unsqueeze({dim})")
            case "squeeze":
                self.add(f"{name}.squeeze({self.of('', str(dim))})")
            case "expand":
                place = dim % len(shape)
                sizes = [-1] * (len(shape) + 1)
                sizes[place] = 3
                self.add(f"{name}.unsqueeze({place}).expand({sizes})")
            case "stack":
                self.add(f"torch.stack([{name}, {other}], {dim})")
            case "cat":
                names = [t for t in self.tensors()[-6:] if len(self.shape(t)) == len(shape)]
                self.add(f"torch.cat([{', '.join(rng.choices(names, k=rng.choice((2, 3))))}], {dim})")
            case "pointwise":
                self.add(f"{name} {self.of('+', '*', '-')} {self.of(other, name + '.tanh()', '2', other)}")
            case "index":
                self.add(f"{name}[{before}{rng.sample(range(-size, 0), min(2, size))}]")
            case "index_select":
                self.add(f"{name}.index_select({dim}, torch.tensor([{at % size}]))")
            case "flip":
                self.add(f"{name}.flip({dim})")
            case "roll":
                self.add(f"{name}.roll(1, {dim})")
            case "repeat":
                self.add(f"{name}.repeat_interleave(2, {dim})")
            case "tile":
                self.add(f"{name}.tile(2)")
            case "write":
                self.write(name, f"{before}{at}")
            case "sum":
                self.add(f"{name}.{self.of('sum', 'mean', 'amax')}({dim})")
            case "T":
                self.add(f"{name}.mT")
            case "einsum":
                self.add(f"torch.einsum('...a,...a->...', {name}, {other})")
            case "complex":
                if self.add(f"{name}.contiguous().unflatten(-1, (-1, 2))"):
                    self.add(f"torch.view_as_real(torch.view_as_complex({self.tensors()[-1]}) * 1j).flatten(-2)")
            case "gather":
                self.add(f"torch.take_along_dim({name}, {name}.argsort({dim}), {dim})")
            case "trapezoid":
                self.add(f"torch.trapezoid({name}, dim={dim})")
            case "diff":
                self.add(f"{name}.diff(dim={dim})")
            case "stride":
                self.add(f"{name}.unfold({dim}, {self.of('1', '2')}, {self.of('1', '2')})")
            case "contiguous":
                self.add(f"{name}.contiguous()")
            case "shape":
                self.add(f"{name} / {name}.shape[{dim}]")
            case _:
                pass


def random_body(seed: int) -> Body:
    """A body of up to ten lines, which makes its last tensor."""
    rng = random.Random(seed)
    project = nn.Linear(WIDTH, FEATURES)
    writer = Writer(
        rng, {"h0": project(torch.randn(BATCH, LENGTH, WIDTH)).detach(), "torch": torch}, [], rng.random() < 0.7
    )
    if writer.gentle:
        writer.heads()
    for _ in range(rng.choice((3, 6, 12))):
        writer.step()
    last = writer.tensors()[-1]
    made = [t for t in writer.tensors() if t == last or (len(writer.shape(t)) > 1 and rng.random() < 0.2)]
    chosen, contracted = rng.choice(made), None
    shape = writer.shape(chosen)
    lines = [*writer.lines, f"made = {chosen}"]
    if len(shape) > 1 and rng.random() < 0.5:
        flat = rng.randrange(1, len(shape))
        lines[-1] += f".flatten({flat})"
        contracted = shape[flat:].numel()
    return Body(lines, contracted if contracted is None or contracted > 1 else None)


PLANS = (
    {"project": "colwise"},
    {"project": {"style": "colwise", "packed": ["q", "k", "v"]}},
    {"project": {"style": "colwise", "packed": {"q": 24, "k": 12, "v": 12}}},
)


def random_plan(seed: int, body: Body) -> dict[str, object]:
    """A plan for it."""
    rng = random.Random(seed)
    rules = dict(rng.choice((PLANS[0], *PLANS)))
    if isinstance(body.out, nn.Linear) and rng.random() < 0.7:
        rules["out"] = rng.choice(("rowwise", "rowwise", "colwise"))
    return {"version": 1, "modules": rules}

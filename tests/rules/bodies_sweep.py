"""Try every body: python -m tests.rules.bodies_sweep [LINE-NUMBERS...]"""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import torch
from torch import nn

import tpplan
from tests.rules.bodies import ALL, BATCH, MODELS, SEQUENCE, WIDTH, Summed
from tpplan.parity import UnshardedError
from tpplan.parity.compare import NOTHING_BUT_ZEROS


def outcome(kind: type[nn.Module], line: str, ranks: int = 2) -> str:
    """What comes of it: "equal", "refused TP…", "wrong …", "crashed …", or "none" where torch itself can't run it."""
    x = torch.randn(BATCH, SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(0))
    try:
        model = kind(line)
        model(x)
    except Exception as error:
        return f"none {error}"
    x.requires_grad_()
    rules = {"up": "colwise", "down": "rowwise"} if getattr(model, "fits", kind is Summed) else {"up": "colwise"}
    try:
        report = tpplan.verify(model, tpplan.load_plan({"version": 1, "modules": rules}), ranks, inputs=(x,))
    except UnshardedError as error:
        return f"none {error}"
    except tpplan.TpplanError as error:
        codes = sorted({d.code for d in getattr(error, "diagnostics", ())})
        return f"refused {' '.join(codes)}" if codes else f"crashed {type(error).__name__}: {error}"
    except Exception as error:
        return f"crashed {type(error).__name__}: {error}"
    if report.problems == (NOTHING_BUT_ZEROS,):
        return "none but zeros"
    return "equal" if report.ok else f"wrong {report.problems}"


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    wanted = [ALL[int(n)] for n in sys.argv[1:]] or ALL
    for line in wanted:
        for kind in MODELS:
            came = outcome(kind, line)
            counts[f"{kind.__name__} {came.split()[0]}"] += 1
            if came.split()[0] not in ("equal", "refused") or len(sys.argv) > 1:
                print(f"{ALL.index(line)} {kind.__name__:8} {line}: {came[:300]}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()

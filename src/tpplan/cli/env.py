"""`tpplan env`: what a report of a bug needs to know of this machine, and of a program."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from typing import TYPE_CHECKING

from tpplan.cli.arguments import AUTO_HELP, add_command, add_model_arguments
from tpplan.cli.compile_model import compile_for, model_and_inputs, plan_named, refuse_model_options
from tpplan.cli.exit_codes import CLEAN, UsageError

if TYPE_CHECKING:
    from tpplan.cli.arguments import Subparsers

_EXAMPLES = """\
  tpplan env                                          versions and devices
  tpplan env --plan my.yaml --model ./checkpoint --tp 4   and the digest of a program
"""
_PACKAGES = ("tpplan", "torch", "triton", "transformers", "accelerate", "peft", "safetensors", "numpy", "pydantic")


def register(subparsers: Subparsers) -> None:
    """Add the command to the parser."""
    parser = add_command(
        subparsers,
        "env",
        help="print versions and devices, for a report of a bug",
        description="Print versions, devices and settings; with a plan and a model, the digest of their program.",
        examples=_EXAMPLES,
    )
    parser.add_argument("--plan", metavar="PLAN", help=f"{AUTO_HELP}; needs --model")
    add_model_arguments(parser, required=False, partial=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each fact."""
    from importlib.metadata import PackageNotFoundError, version

    if (arguments.plan is None) != (arguments.model is None):
        raise UsageError("--plan and --model go together: they make a program")
    plan = None
    if arguments.model is None:
        refuse_model_options(arguments)
    else:
        plan = plan_named(arguments.plan)
    facts = {"python": platform.python_version(), "platform": platform.platform(), "cpus": str(os.cpu_count())}
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    facts |= _devices()
    facts |= {name: value for name, value in sorted(os.environ.items()) if name.startswith("TPPLAN_")}
    if plan is not None:
        program = compile_for(arguments, plan, *model_and_inputs(arguments))
        facts["program"] = f"{program.digest} ({arguments.plan} for {program.model} at tp={program.size})"
    for name, value in facts.items():
        print(f"{name:<12}  {value}")
    sys.stdout.flush()
    return CLEAN


def _devices() -> dict[str, str]:
    import torch

    count = torch.cuda.device_count()
    if not count:
        return {"cuda": f"no device (torch built for {torch.version.cuda or 'none'})"}
    names = {torch.cuda.get_device_name(number) for number in range(count)}
    backends = [name for name in ("nccl", "gloo") if getattr(torch.distributed, f"is_{name}_available")()]
    return {
        "cuda": f"{count} × {', '.join(sorted(names))} (CUDA {torch.version.cuda})",
        "backends": ", ".join(backends),
    }

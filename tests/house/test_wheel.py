"""What is shipped is whole: plans, types and the command are found from a wheel and from a checkout alike."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "plans"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

needs_installation = pytest.mark.skipif(
    not list(importlib.metadata.distributions(name="tpplan")),
    reason="tpplan isn't installed in this environment",
)

REPORT = """
import json, pathlib, sys, tpplan
from tpplan.plan.locate import shipped_plan_directory

directory = pathlib.Path(shipped_plan_directory())
plans = sorted(path.relative_to(directory).with_suffix("").as_posix() for path in directory.rglob("*.yaml"))
for path in directory.rglob("*.yaml"):
    tpplan.load_plan(path)
for path in directory.glob("*.yaml"):
    tpplan.load_plan(path.stem)
print(json.dumps({
    "package": str(pathlib.Path(tpplan.__file__).parent),
    "directory": str(directory),
    "plans": plans,
    "version": tpplan.__version__,
    "torch": "torch" in sys.modules,
}))
"""


def output_of(*command: object, cwd: Path = ROOT) -> str:
    ran = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{' '.join(map(str, command))}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def plan_names() -> list[str]:
    return sorted(path.relative_to(PLANS).with_suffix("").as_posix() for path in PLANS.rglob("*.yaml"))


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """An sdist of the checkout, and a wheel built from what that sdist holds."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    output_of(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    output_of(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=unpacked)
    (wheel,) = folder.glob("*.whl")
    return {"sdist": unpacked, "wheel": wheel}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """The wheel in an environment of its own that borrows this one's dependencies, but not its tpplan."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    output_of(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built["wheel"])
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # A .pth file's own .pth files aren't read, so an editable tpplan next to the dependencies stays out of sight.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


@pytest.mark.slow
def test_wheel_holds_package_plans_and_types(built):
    names = set(zipfile.ZipFile(built["wheel"]).namelist())
    for path in (ROOT / "src" / "tpplan").rglob("*.py"):
        assert path.relative_to(ROOT / "src").as_posix() in names
    for path in PLANS.rglob("*.yaml"):
        assert f"tpplan/_plans/{path.relative_to(PLANS).as_posix()}" in names
    assert "tpplan/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"tpplan", f"tpplan-{PROJECT['version']}.dist-info"}


@pytest.mark.slow
def test_sdist_holds_what_the_tests_need(built):
    for name in ("pyproject.toml", "Makefile", "LICENSE", "README.md", "src", "plans", "tests"):
        assert (built["sdist"] / name).exists()


@pytest.mark.slow
def test_plans_are_found_from_a_wheel(installed, tmp_path):
    report = json.loads(output_of(installed / "bin" / "python", "-c", REPORT, cwd=tmp_path))
    assert Path(report["package"]).is_relative_to(installed)
    assert Path(report["directory"]).is_relative_to(installed)
    assert report["plans"] == plan_names()
    assert report["version"] == PROJECT["version"]
    assert not report["torch"]


@pytest.mark.slow
def test_command_runs_from_a_wheel(installed, tmp_path):
    command = installed / "bin" / "tpplan"
    assert "usage: tpplan" in output_of(command, "--help", cwd=tmp_path)
    output_of(command, "validate", *sorted(PLANS.rglob("*.yaml")), cwd=tmp_path)


@needs_installation
def test_plans_are_found_from_a_checkout(tmp_path):
    report = json.loads(output_of(sys.executable, "-c", REPORT, cwd=tmp_path))
    if not Path(report["package"]).is_relative_to(ROOT):
        pytest.skip("this environment's tpplan isn't the checkout's")
    assert Path(report["directory"]) == PLANS
    assert report["plans"] == plan_names()


@needs_installation
def test_version_is_kept_in_one_place():
    import tpplan

    assert tpplan.__version__ == PROJECT["version"], "the version has changed; install anew: pip install -e ."

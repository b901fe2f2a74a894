"""What every test gets: no network, few threads, fixed seeds, and no process group left over from another test."""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
from collections.abc import Generator, Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Read by torch when it is first imported, here and in each process that a test spawns.
    os.environ["OMP_NUM_THREADS"] = "1"
if "PYTHONPATH" in os.environ:
    # `PYTHONPATH=src pytest` has to hold for a process that a test starts in another folder, too.
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in folders if folder)

_SLOW = 7  # one in so many slow cases of one test runs with the slow tests
_EVERY = "TPPLAN_TEST_EVERY_CASE"  # where it's set, all quick cases run
_SPREAD = (5**0.5 - 1) / 2  # multiples of it are spread evenly, whatever the period of what cases differ in


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: hundreds of thousands of objects, which no garbage collection needs to look at again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Some cases of one test are left to the sweep.

    Of quick ones as many as `one_in` says; all slow ones where the test has quick ones, else most.
    """
    cases: dict[tuple[object, str, bool], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep") is None:
            is_slow = item.get_closest_marker("slow") is not None
            cases.setdefault((item.parent, getattr(item, "originalname", item.name), is_slow), []).append(item)
    for (parent, name, is_slow), alike in cases.items():
        marker = alike[0].get_closest_marker("one_in")
        share = _SLOW if is_slow else 1 if marker is None or _EVERY in os.environ else marker.args[0]
        left = is_slow and (parent, name, False) in cases
        for place, item in enumerate(alike):
            if left or place * _SPREAD % 1 >= 1 / share:
                item.add_marker("sweep")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a module of tests draws when it is imported is the same whichever tests are chosen."""
    if isinstance(collector, pytest.Module):
        import torch

        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _few_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes, or several xdist workers, with a thread pool each would fight over the cores."""
    if request.node.get_closest_marker("processes") is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a verification start from one that has imported what they need, unless a test is about that."""
    marked = request.node.get_closest_marker
    if marked("processes") is not None and marked("spawned") is None:
        from tests.runtime.world import start_forked

        monkeypatch.setattr("tpplan.parity.processes.spawn", start_forked)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    # numpy and torch are seeded only where a test has imported them, so that the torch-free tests stay quick.
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:  # by the generator: `torch.manual_seed` formats its stack for each kind of device
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """A browser without a window."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright isn't installed: `pip install playwright`"
    )
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium on the PATH: `apt-get install chromium`")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()

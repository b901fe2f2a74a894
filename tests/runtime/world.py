"""Worlds of real gloo processes that stay up between tests, since starting them costs more than what they compute.

`world(4).run(function, *arguments)` calls `function(world, *arguments)` in each process and returns the results by
rank. A function must be importable by name. An error in any process is raised here, with that process's traceback.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.device_mesh import DeviceMesh

SECONDS = 240.0


@dataclass(frozen=True)
class Member:
    """What a function learns of the process that it runs in."""

    rank: int
    size: int

    def mesh(self, *shape: int, names: tuple[str, ...] = ("tp",)) -> DeviceMesh:
        """A mesh over all processes; one axis `tp` unless told otherwise."""
        return _mesh(shape or (self.size,), names)


class WorldError(AssertionError):
    """A process raised, died, or took too long."""


class World:
    """Processes that wait for functions to call."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = _server()
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        with _environment():
            for rank in range(size):
                ours, theirs = context.Pipe()
                path = str(Path(self._folder.name) / "rendezvous")
                process = context.Process(target=_serve, args=(rank, size, path, theirs), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Any]:
        """Call `function(member, *arguments)` everywhere; the results by rank."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results: dict[int, Any] = {}
        errors: list[str] = []
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            # Once a process has failed, the others may wait for it in a collective until theirs times out.
            ready = wait(list(waiting), timeout=5.0 if errors else seconds)
            if not ready:
                errors.append(f"ranks {sorted(waiting.values())} did not answer")
                self.close()
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # pyright: ignore
                try:
                    ok, held = pipe.recv()  # pyright: ignore
                except EOFError:
                    ok, held = False, "the process died"
                if ok:
                    results[rank] = held
                else:
                    errors.append(f"rank {rank}:\n{held}")
        if errors:
            if len(errors) < self.size:
                self.close()  # what one process has left undone may meet the next function's collectives
            raise WorldError("\n".join(errors))
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes. The next call of `world` starts new ones."""
        _worlds.pop(self.size, None)
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def start_forked(function: Callable[..., object], args: tuple[Any, ...], nprocs: int, join: bool) -> Any:
    """As `torch.multiprocessing.spawn`, with processes that needn't import anything."""
    from torch.multiprocessing.spawn import start_processes

    _server()
    with _environment():
        return start_processes(function, args, nprocs, join, start_method="forkserver")


def _server() -> Any:
    """What forks processes, from one that has imported torch, transformers and tpplan."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runtime.preload"])
    return context


def _environment() -> Any:
    """One thread a process; and a path of Python by which the server finds this folder's modules."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONPATH": path})


_worlds: dict[int, World] = {}


def world(size: int) -> World:
    """The world of this size, started when it's first asked for."""
    if size not in _worlds:
        _worlds[size] = World(size)
    return _worlds[size]


@atexit.register
def _close_all() -> None:
    for held in list(_worlds.values()):
        held.close()


@functools.cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _serve(rank: int, size: int, path: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    member = Member(rank, size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((True, function(member, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))

"""What the tests of both kernels share: wrong copies of a module, and counts of what it costs.

A test with the fixture ``device`` runs on "cpu", where Triton interprets the kernel, and on "gpu".
"""

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701  torch names no other

# A first example can take a minute where servers start on the same cores.
CAREFUL = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A wrong kernel only has to be caught: no need to shrink what caught it.
QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
DEVICES = ("cpu", pytest.param("cuda", id="gpu", marks=NO_GPU))

Edit = tuple[str, str]
_serial = itertools.count()


def load_copy(
    module: ModuleType, folder: Path, *edits: Edit, interpret: bool = False
) -> ModuleType:
    """Import ``module`` once more, with each ``old`` text replaced by ``new``.

    Triton reads a kernel's source from its file, and decides while it decorates the kernel whether
    to interpret it.
    """
    path = Path(str(module.__file__))
    text, name = path.read_text(), f"{path.stem}_{next(_serial)}"
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} places of {old!r}"
        text = text.replace(old, new)
    if edits:
        path = folder / f"{name}.py"
        path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1" if interpret else "0"):
        spec.loader.exec_module(copy)
    return copy


def find_survivors(
    module: ModuleType, folder: Path, wrong: Mapping[str, Edit], check: Callable[[ModuleType], None]
) -> list[str]:
    """Names of the wrong versions that ``check`` lets pass. It must let the right one pass."""
    check(load_copy(module, folder, interpret=True))
    survivors = []
    for name, edit in wrong.items():
        copy = load_copy(module, folder, edit, interpret=True)
        try:
            check(copy)
        except (AssertionError, IndexError, RuntimeError):
            continue
        survivors.append(name)
    return survivors


class _Kernel:
    """Takes a kernel's place: ``launch(*arguments, grid=grid, **options)`` runs for each launch."""

    def __init__(self, launch: Callable[..., Any]):
        self.launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.launch, grid=grid)


class _Operations(TorchDispatchMode):
    """Notes what torch dispatches, views aside: on a GPU, each is a launch or an allocation."""

    _VIEWS = ("aten.slice", "aten.unsqueeze", "aten.view", "aten.alias", "aten.select")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith(self._VIEWS):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def list_work(module: ModuleType, kernel: str, call: Callable[[], Any], device: str) -> list[str]:
    """Names of what ``call`` gives the device to do, allocations included on the CPU.

    On the CPU, the kernel named ``kernel`` of ``module`` is counted, but does not run.
    """
    if device == "cpu":
        with _Operations() as operations:
            note = _Kernel(lambda *_, **options: operations.names.append(kernel))
            with mock.patch.object(module, kernel, note):
                call()
        return operations.names
    call()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):
        torch.cuda.synchronize()  # the first profile of a process may miss its first events
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on_device]


def count_compilations(
    module: ModuleType, kernel: str, calls: Iterable[Callable[[], Any]], device: str
) -> int:
    """How many kernels ``module`` has compiled after ``calls``; on the CPU, they only compile.

    ``module`` is a copy of its own that does not interpret.
    """
    compiler = getattr(module, kernel)
    if device == "cpu":
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        hopper = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
        with (
            mock.patch.object(driver, "_active", hopper),
            mock.patch.multiple(module, _INTERPRETED=True, **{kernel: _Kernel(compiler.warmup)}),
        ):
            for call in calls:
                call()
    else:
        for call in calls:
            call()
    return sum(len(cache[0]) for cache in compiler.device_caches.values())

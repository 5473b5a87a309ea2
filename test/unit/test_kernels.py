"""The kernel under Triton's interpreter, and what it costs in launches and compilations. No GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from formula import INTEGERS, Case, expected, live_batches
from hypothesis import HealthCheck, Phase, given, settings
from inkling_sconv.ops import track_conv_indices
from inkling_sconv.plugin.backend import InklingSconvBackend
from steps import BATCHES, Step, load, refresh_arguments, run, steps
from torch.utils._python_dispatch import TorchDispatchMode

triton = pytest.importorskip("triton")

CAREFUL = settings(max_examples=200, deadline=None)
# A wrong kernel only has to be caught: no need to shrink what caught it.
QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

LIVE = Step(3, [0, 64, 128, 192], [64, 64], [0, 0])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    module = load(tmp_path_factory.mktemp("kernels"), interpret=True)
    assert module._INTERPRETED
    return module


def test_what_the_kernel_computes(kernels):
    @CAREFUL
    @given(case=live_batches(max_rows=40))
    def is_the_formula(case: Case) -> None:
        step = Step(
            case.rows,
            case.query_start_loc,
            case.track_seqlens,
            case.prefix_lens,
            case.chunk_size,
            case.window,
            (torch.int32, *case.dtypes),
        )
        assert run(kernels.track_conv_indices, step) == expected(case)

    @CAREFUL
    @given(step=steps())
    def is_the_reference(step: Step) -> None:
        assert_reference(kernels, step)

    for batch in BATCHES:
        assert_reference(kernels, batch)
    is_the_formula()
    is_the_reference()


def assert_reference(kernels: ModuleType, step: Step) -> None:
    assert run(kernels.track_conv_indices, step) == run(
        track_conv_indices.track_conv_indices_ref, step
    )


@pytest.mark.parametrize("prefix_lens", (None, [0, 0, 0]))
@pytest.mark.parametrize("live", (0, 2, 3))
def test_the_padded_tail_is_zero(kernels, live, prefix_lens):
    step = Step(3, [0, 64, 128, 192], [64, 64, 64][:live], prefix_lens)
    got = run(kernels.track_conv_indices, step)
    assert got == [[61, 62, 63], [125, 126, 127], [189, 190, 191]][:live] + [[0, 0, 0]] * (3 - live)


@pytest.mark.parametrize("rows", (0, 1, 9))
@pytest.mark.parametrize("prefix", (False, True))
def test_a_step_with_no_tokens_gives_index_zero(kernels, rows, prefix):
    step = Step(rows, [0] * (rows + 1), [640] * rows, [64] * rows if prefix else None)
    assert run(kernels.track_conv_indices, step) == [[0, 0, 0]] * rows


@pytest.mark.parametrize("dtype", INTEGERS)
def test_lengths_at_the_ends_of_a_dtype_wrap_as_torch_does(kernels, dtype):
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    step = Step(2, [0, 64, 128], [most, least], [least, most], dtypes=(torch.int32, dtype, dtype))
    for chunk_size in (1, 64, 96):
        assert_reference(kernels, replace(step, chunk_size=chunk_size))


def test_a_query_start_loc_longer_than_the_step(kernels):
    step = Step(3, [0, 64, 128, 192, 256], [64, 64, 192], None)
    assert run(kernels.track_conv_indices, step)[2] == [255, 255, 255]
    assert_reference(kernels, step)


@pytest.mark.parametrize(
    "out",
    (
        torch.zeros(3, 3, dtype=torch.int32),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(3, 4, dtype=torch.int64)[:, :3],
    ),
)
def test_an_out_that_the_store_does_not_fit_is_refused(kernels, out):
    with pytest.raises(AssertionError):
        track_conv_indices.track_conv_indices(**LIVE.arguments(), out=out)


WRONG_KERNELS = {
    "tail not zeroed": ("is_live = row < live", "is_live = row < rows"),
    "no lower clamp": ("tl.maximum(index, 0)", "index"),
    "no upper clamp": ("tl.minimum(tl.maximum(index, 0), tl.maximum(tokens - 1, 0))", "index"),
    "no tokens gives -1": ("tl.maximum(tokens - 1, 0)", "tokens - 1"),
    "last live entry taken for the last": (
        "tl.load(query_start_loc + rows)",
        "tl.load(query_start_loc + live)",
    ),
    "truncating division": ("tracked & -CHUNK", "tracked // CHUNK * CHUNK"),
    "truncating division, odd chunks": ("tl.where(rest < 0, rest + CHUNK, rest)", "rest"),
    "every chunk a power of two": ("if CHUNK & (CHUNK - 1) == 0:", "if CHUNK > 0:"),
    "no chunk alignment": ("index = start + aligned", "index = start + tracked"),
    "lengths in 32 bits": (
        "tl.load(track_seqlens + row, mask=is_live, other=0).to(tl.int64)",
        "tl.load(track_seqlens + row, mask=is_live, other=0).to(tl.int32)",
    ),
    "prefix ignored": ("tracked -= tl.load(", "tracked -= 0 * tl.load("),
    "window one row late": ("(column - WINDOW)", "(column - WINDOW + 1)"),
    "rows past the last are written": ("mask=row < rows", "mask=row < rows + 1"),
    "one program only": ("-(-rows * window // _BLOCK),", "1,"),
    "rows and columns swapped": ("column = offset % WINDOW", "column = offset // WINDOW"),
    "live ignores prefix lengths": ("live = min(live, prefix_lens.numel())", "pass"),
    "live ignores track seqlens": ("live = min(rows, track_seqlens.numel())", "live = rows"),
    "strides not checked": ("        and track_seqlens.is_contiguous()\n", ""),
    "longer query_start_loc not checked": (
        "        and query_start_loc.numel() == rows + 1\n",
        "",
    ),
}


def catches(kernels: ModuleType) -> bool:
    """Whether the comparison with the reference finds ``kernels`` wrong."""

    @QUICK
    @given(step=steps(least=1))
    def is_the_reference(step: Step) -> None:
        assert_reference(kernels, step)

    try:
        for batch in BATCHES:
            assert_reference(kernels, batch)
        is_the_reference()
    except AssertionError:
        return True
    return False


def test_wrong_kernels_are_caught(tmp_path):
    assert not catches(load(tmp_path, interpret=True)), "the table means nothing"
    survivors = [
        name
        for name, edit in WRONG_KERNELS.items()
        if not catches(load(tmp_path, edit, interpret=True))
    ]
    assert not survivors, f"nobody kills: {survivors}"


class _Launches:
    """In the place of the kernel: counts launches, runs nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.count += 1

        return launch


class _Operations(TorchDispatchMode):
    """Names what is dispatched, views aside: each is a launch on a GPU, or an allocation."""

    _VIEWS = ("aten.slice", "aten.unsqueeze", "aten.view", "aten.alias", "aten.select")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith(self._VIEWS):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("prefix", (False, True))
def test_one_launch_and_nothing_else(kernels, monkeypatch, prefix):
    launches = _Launches()
    monkeypatch.setattr(kernels, "_track_conv_indices_kernel", launches)
    arguments = replace(LIVE, prefix_lens=[0, 0] if prefix else None).arguments()
    out = torch.empty(3, 3, dtype=torch.int64)
    with _Operations() as operations:
        track_conv_indices.track_conv_indices(**arguments, out=out)
    assert (launches.count, operations.names) == (1, [])
    with _Operations() as operations:
        track_conv_indices.track_conv_indices(**arguments)
    assert (launches.count, operations.names) == (2, ["aten.empty.memory_format"])


def test_no_launch_for_no_rows(kernels, monkeypatch):
    launches = _Launches()
    monkeypatch.setattr(kernels, "_track_conv_indices_kernel", launches)
    assert track_conv_indices.track_conv_indices(**Step(0, [0], [], None).arguments()).shape == (
        0,
        3,
    )
    assert launches.count == 0


@pytest.mark.parametrize("tracked", (False, True))
@pytest.mark.parametrize("on_graph_path", (False, True))
def test_the_whole_refresh_is_one_launch(kernels, monkeypatch, tracked, on_graph_path):
    launches = _Launches()
    monkeypatch.setattr(kernels, "_track_conv_indices_kernel", launches)
    monkeypatch.setattr("inkling_sconv.backend.track_conv_indices", kernels.track_conv_indices)
    backend, batch = refresh_arguments(LIVE, "cpu", tracked=tracked)
    with _Operations() as operations:
        InklingSconvBackend._refresh_track_conv_indices(backend, batch, on_graph_path)
    if not tracked and not on_graph_path:
        assert (launches.count, operations.names) == (0, [])
    else:
        assert launches.count == 1
        assert operations.names == ([] if on_graph_path else ["aten.empty.memory_format"])


@pytest.mark.parametrize(("prefix", "most"), ((False, 12), (True, 13)))
def test_the_torch_path_gets_no_longer(prefix, most):
    step = replace(
        LIVE, prefix_lens=[0, 0] if prefix else None, dtypes=(torch.int32, torch.int32, torch.int32)
    )
    arguments, out = step.arguments(), torch.empty(3, 3, dtype=torch.int64)
    with _Operations() as operations:
        track_conv_indices.track_conv_indices_ref(**arguments, out=out)
    assert len(operations.names) <= most, operations.names


@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_what_is_not_on_a_gpu_takes_the_torch_path(tmp_path, monkeypatch, device):
    compiled = load(tmp_path, interpret=False)
    launches = _Launches()
    monkeypatch.setattr(compiled, "_track_conv_indices_kernel", launches)
    got = compiled.track_conv_indices(**LIVE.arguments(device))
    assert launches.count == 0 and got.shape == (3, 3) and got.device.type == device


def test_a_torch_without_triton_takes_the_torch_path():
    code = """
import sys
sys.modules["triton"] = None
from inkling_sconv.plugin import backend
from inkling_sconv.ops import track_conv_indices
assert backend.track_conv_indices is track_conv_indices.track_conv_indices_ref
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class _NoDriver:
    """A Hopper that compiles and runs nothing."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton's compiler without a GPU, with an empty cache."""
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(driver, "_active", _NoDriver())


def compilations(module: ModuleType, dtypes: tuple[torch.dtype, ...], sizes: range) -> int:
    """How many kernels the launcher's calls compile, over batch sizes, slices and live rows."""
    kernel = module._track_conv_indices_kernel

    class Compiler:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: kernel.warmup(*args, grid=grid, **options)

    module._track_conv_indices_kernel, module._INTERPRETED = Compiler(), True
    try:
        for rows in sizes:
            prefix_lens = [0] * rows if len(dtypes) == 3 else None
            step = Step(rows, [0] * (rows + 1), [0] * (rows - rows % 3), prefix_lens)
            step = replace(step, dtypes=(*dtypes, torch.int32)[:3], offset=rows % 5)
            run_out = torch.empty(rows * 3 + rows % 4, dtype=torch.int64)[rows % 4 :].view(rows, 3)
            module.track_conv_indices(**step.arguments(), out=run_out)
    finally:
        module._track_conv_indices_kernel, module._INTERPRETED = kernel, False
    return len(kernel.device_caches[0][0])


def test_200_batch_sizes_are_one_compilation(compiler, tmp_path):
    module = load(tmp_path, interpret=False)
    pairs = [(q, t) for q in INTEGERS for t in INTEGERS]
    combinations = [*pairs, *((*pair, p) for pair in pairs for p in INTEGERS)]
    live = (torch.int32, torch.int64, torch.int32)
    assert compilations(module, live, range(1, 201)) == 1
    for done, dtypes in enumerate([c for c in combinations if c != live], 2):
        assert compilations(module, dtypes, range(1, 18)) == done


def test_the_count_of_compilations_sees_a_specialised_argument(compiler, tmp_path):
    for name in ("rows", "live", "out", "track_seqlens"):
        edit = (f'"{name}"', '"query_start_loc"')
        module = load(tmp_path, edit, interpret=False)
        assert compilations(module, (torch.int32, torch.int64, torch.int32), range(1, 34)) > 1, name

"""What one refresh costs: ours, the torch chain, SGLang's own, and a kernel that does nothing.

One process measures all contenders in turns: a round measures each contender once, and the next
round begins with another one. Three measures, in microseconds per call:

graph   device time in a replayed CUDA graph of many calls
host    host time of an eager call

``first`` counts seconds and Triton compilations of the first calls at batch sizes never seen
before. Without a GPU the script compares results and measures host time of the reference.

    python benchmark/bench_refresh.py --json out.json --plot out.svg
    python benchmark/bench_refresh.py --sglang-kernel .../sglang/kernels/ops/mamba/sconv_tracking.py
    python benchmark/bench_refresh.py --record out.json --plot out.svg     # draws, measures nothing

The record, where a summary is ``{"median": us, "spread": half the distance of the quartiles}``::

    {"machine": {...}, "sglang": str,
     "measures": {"graph" | "host": {rows: {contender: summary}}},
     "first": {contender: {"seconds": float, "compilations": int}}}
"""

import argparse
import importlib
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# Set before SGLang and Triton are imported: SGLang's class stays as published, and no kernel comes
# from an earlier process.
os.environ["INKLING_SCONV"] = "off"
_SCRATCH = tempfile.TemporaryDirectory(prefix="bench_refresh_")
os.environ["TRITON_CACHE_DIR"] = str(Path(_SCRATCH.name) / "triton")

import torch  # noqa: E402
import triton  # noqa: E402
import triton.testing  # noqa: E402
from inkling_sconv import names  # noqa: E402
from inkling_sconv.ops import track_conv_indices as ops  # noqa: E402
from inkling_sconv.plugin.backend import InklingSconvBackend  # noqa: E402
from inkling_sconv.probe import backend as probe  # noqa: E402
from summary import format_summary, summarize  # noqa: E402

ROWS = (1, 8, 32, 160, 512)
CHUNK, WINDOW, LENGTH = 128, 3, 200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
synchronize = torch.cuda.synchronize if DEVICE == "cuda" else torch.cpu.synchronize
OURS, CHAIN, EMPTY = "ours, kernel", "torch chain", "empty kernel"
OUR_METHOD = "ours, whole method"

Call = Callable[[], Any]
Results = dict[int, dict[str, dict[str, float]]]
"""``{rows: {contender: summary}}``"""


@dataclass(frozen=True)
class Contender:
    """``make(inputs)`` gives the call to measure; it leaves its result in ``inputs.out``."""

    name: str
    make: Callable[[SimpleNamespace], Call]
    computes: bool = True


def make_inputs(rows: int) -> SimpleNamespace:
    """A live step of ``rows`` requests of 200 new tokens, some of them with a cached prefix."""
    prefix = [CHUNK * (r % 5) for r in range(rows)]
    tracked = [(p + LENGTH) // CHUNK * CHUNK for p in prefix]
    return SimpleNamespace(
        rows=rows,
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * LENGTH,
        track_seqlens=torch.tensor(tracked, dtype=torch.int64, device=DEVICE),
        prefix_lens=torch.tensor(prefix, dtype=torch.int32, device=DEVICE),
        out=torch.full((rows, WINDOW), -7, dtype=torch.int64, device=DEVICE),
    )


def make_contender(name: str, compute: Callable[..., Any], *, computes: bool = True) -> Contender:
    """A contender that calls ``compute``, which has the signature of ``track_conv_indices``."""

    def make(step: SimpleNamespace) -> Call:
        lengths = (step.query_start_loc, step.track_seqlens, step.prefix_lens)
        rows, out = step.rows, step.out
        return lambda: compute(*lengths, rows=rows, chunk_size=CHUNK, window=WINDOW, out=out)

    return Contender(name, make, computes)


def make_method(name: str, cls: type, max_rows: int) -> Contender:
    """The refresh of a backend class, on the graph path with a live batch."""

    def make(step: SimpleNamespace) -> Call:
        rig = probe.Rig(cls, max_rows=max_rows, window=WINDOW, chunk_size=CHUNK, device=DEVICE)
        batch = rig.make_batch("EXTEND", step.rows, mask=[True] * step.rows)
        batch.mamba_track_seqlens = step.track_seqlens
        batch.extend_prefix_lens = step.prefix_lens
        rig.backend.sconv_metadata.query_start_loc = step.query_start_loc
        step.out = getattr(rig.backend, names.STATIC_INDICES)[: step.rows]
        refresh = getattr(rig.backend, names.REFRESH)
        return lambda: refresh(batch, True)

    return Contender(name, make)


def find_methods(max_rows: int) -> tuple[list[Contender], str]:
    """Ours and SGLang's own method, on SGLang's class; and a line that says which SGLang."""
    module = importlib.import_module(names.BACKEND_MODULE)
    (cls, *_) = probe.find_backends(module)
    release = f"SGLang {version('sglang')}"

    def alloc(self: Any) -> None:
        cls._alloc_graph_buffers(self)
        InklingSconvBackend._alloc_inert_tracking(self)

    refresh = InklingSconvBackend._refresh_track_conv_indices
    ours = type("Ours", (cls,), {names.ALLOC_GRAPH_BUFFERS: alloc, names.REFRESH: refresh})
    found = f"{release}: {probe.classify(cls).state.value}, method as published"
    theirs = make_method(f"{release}, its method", cls, max_rows)
    return [make_method(OUR_METHOD, ours, max_rows), theirs], found


def find_sglang_kernel(path: Path | None) -> Contender | None:
    """SGLang's kernel: that of ``path``, or of the installed release if it has one."""
    if path is not None:
        module = load(path, "sglang_sconv_tracking")
        name = f"SGLang's kernel ({path.name} given)"
    else:
        try:
            module = importlib.import_module("sglang.kernels.ops.mamba.sconv_tracking")
        except ImportError:
            return None
        name = "SGLang's kernel"

    def compute(query_start_loc, track_seqlens, prefix_lens, *, rows, chunk_size, window, out):
        module.fill_track_conv_indices(
            query_start_loc=query_start_loc,
            track_seqlens=track_seqlens,
            prefix_lens=prefix_lens,
            output=out,
            live=min(rows, track_seqlens.shape[0], prefix_lens.shape[0]),
            chunk_size=chunk_size,
        )

    return make_contender(name, compute)


@triton.jit
def _empty_kernel():
    pass


EMPTY_CONTENDER = Contender(EMPTY, lambda _: lambda: _empty_kernel[(1,)](num_warps=1), False)


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        sys.exit(f"bench_refresh: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def time_graph(call: Call, calls: int) -> float:
    """Microseconds of device time per call in a replayed graph of ``calls`` calls.

    Launches inside the graph count: most of a refresh is launch. CUPTI, which
    ``flashinfer.testing.bench_gpu_time`` uses, leaves them out.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    milliseconds = triton.testing.do_bench(graph.replay, warmup=2, rep=8, return_mode="median")
    return milliseconds * 1e3 / calls


def time_host(call: Call, calls: int) -> float:
    """Microseconds of host time per call. The device is faster than its host, so nothing waits."""
    synchronize()
    return timeit.timeit(call, number=calls) / calls * 1e6


TIMERS = {"graph": time_graph, "host": time_host}


def measure(contenders: list[Contender], kind: str, options: argparse.Namespace) -> Results:
    """Summaries of one measure; every round begins with another contender.

    The addresses of tensors and graphs move a launch by up to a tenth: only a new call with new
    tensors in each round shows this as spread, so the tensors of earlier rounds are kept.
    """
    results, kept = {}, []
    for rows in options.rows:
        figures: dict[str, list[float]] = {one.name: [] for one in contenders}
        for turn in range(options.rounds):
            first = turn % len(contenders)
            for one in contenders[first:] + contenders[:first]:
                call = one.make(make_inputs(rows))
                call()  # compiles, in the first round
                figures[one.name].append(TIMERS[kind](call, options.calls))
                kept.append(call)
        results[rows] = {name: summarize(values) for name, values in figures.items()}
    return results


def measure_first_calls(contenders: list[Contender], sizes: int) -> dict[str, dict[str, Any]]:
    """Seconds and compilations of one call at each of ``sizes`` sizes, new to this process."""
    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
    results = {}
    for number, contender in enumerate(contenders):
        # No two contenders get the same size, as they may share a kernel.
        numbers = range(3 + number, 3 + number + sizes * len(contenders), len(contenders))
        contender.make(make_inputs(2))()
        calls = [contender.make(make_inputs(rows)) for rows in numbers]
        synchronize()
        start, before = time.perf_counter(), len(compiled)
        for call in calls:
            call()
        synchronize()
        seconds = time.perf_counter() - start
        results[contender.name] = {"seconds": seconds, "compilations": len(compiled) - before}
    triton.knobs.runtime.jit_post_compile_hook = None
    return results


def print_table(title: str, results: Results, base: str) -> None:
    """Contenders by batch sizes; a cell has the median, its spread, and its ratio to ``base``."""
    print(f"\n{title}\n{'':46}" + "".join(f"{f'{rows} rows':>22}" for rows in results))
    for name in next(iter(results.values())):
        ratios = (of[name]["median"] / of[base]["median"] for of in results.values())
        cells = (format_summary(of[name]) for of in results.values())
        row = (f"{cell:>14}{ratio:7.2f}x" for cell, ratio in zip(cells, ratios, strict=True))
        print(f"{name:46}" + "".join(row))


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the graph and host measures of a record, this run's or one read from JSON."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    # Text stays text, and two runs of one record give one file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "inkling_sconv"})
    panels = {"graph": "replayed CUDA graph, device time", "host": "eager, host time"}
    figure = Figure(figsize=(11, 4.2))
    axes = figure.subplots(1, len(panels), sharex=True)
    for axis, (kind, title) in zip(axes, panels.items(), strict=True):
        results = report["measures"][kind]
        rows = [int(count) for count in results]
        for name in next(iter(results.values())):
            summaries = [of[name] for of in results.values()]
            axis.errorbar(
                rows,
                [summary["median"] for summary in summaries],
                yerr=[summary["spread"] for summary in summaries],
                label=name,
                marker="o",
                markersize=4,
                linewidth=2 if name in (OURS, OUR_METHOD) else 1,
                linestyle=":" if name == EMPTY else "-",
            )
        axis.set(xscale="log", yscale="log", xlabel="rows", ylabel="us per refresh", title=title)
        axis.set_xticks(rows, [str(count) for count in rows])
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, ncols=3, loc="lower center")
    about = report["machine"]
    line = f"{about['device']}, torch {about['torch']}, triton {about['triton']}"
    figure.suptitle(line, fontsize=9)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def describe_machine() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "device": device or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(sys.argv),
    }


def check(contenders: list[Contender], rows_list: Iterable[int]) -> None:
    """Exit unless every contender gives the reference's bits: else its time means nothing."""
    for rows in rows_list:
        for contender in contenders:
            if contender.computes:
                step, want = make_inputs(rows), make_inputs(rows)
                make_contender(CHAIN, ops.track_conv_indices_ref).make(want)()
                contender.make(step)()
                if not torch.equal(step.out, want.out):
                    sys.exit(f"bench_refresh: {contender.name} is wrong at {rows} rows")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--calls", type=int, default=200, help="calls in a graph, or in a loop")
    parser.add_argument("--new-sizes", type=int, default=200, help="batch sizes of first calls")
    parser.add_argument("--sglang-kernel", type=Path, metavar="FILE", help="its sconv_tracking.py")
    parser.add_argument("--record", type=Path, metavar="JSON", help="plot this record and end")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="a .svg or .png")
    options = parser.parse_args()
    if options.record and not options.plot:
        parser.error("--record needs --plot")
    return options


def main() -> None:
    options = parse_arguments()
    if options.record:
        plot(json.loads(options.record.read_text()), options.plot)
        return
    gpu = DEVICE == "cuda"
    about = describe_machine()
    methods, found = find_methods(max(*options.rows, 6 * options.new_sizes + 16))
    print(*about.values(), found, sep=", ")
    ours = OURS if gpu else "ours, reference"
    contenders = [
        make_contender(ours, ops.track_conv_indices),
        make_contender(CHAIN, ops.track_conv_indices_ref),
        *methods,
    ]
    rival = find_sglang_kernel(options.sglang_kernel) if gpu else None
    if gpu:
        contenders += [*filter(None, [rival]), EMPTY_CONTENDER]
    else:
        print("No CUDA device: the reference runs for ours; host time only, no plot.")

    report: dict[str, Any] = {"machine": about, "sglang": found, "measures": {}}
    if gpu:
        report["first"] = measure_first_calls(contenders, options.new_sizes)
    check(contenders, options.rows)
    print("Every contender gives the reference's bits.")
    for kind in TIMERS if gpu else ("host",):
        results = report["measures"][kind] = measure(contenders, kind, options)
        print_table(f"{kind}: us per call", results, ours)
    if gpu:
        print(f"\nfirst calls at {options.new_sizes} new batch sizes")
        for name, first in report["first"].items():
            print(f"{name:46}{first['compilations']} compilations, {first['seconds']:.2f} s")
        if options.plot:
            plot(report, options.plot)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""What a server costs with each form of the guard: tiny Inkling, its MTP heads, CUDA graphs.

The contenders run on a fork made of the installed SGLang: as it was between #34043 and #35042.

guard in the file   the fork after ``inkling-sconv apply``, plugin off: SGLang's code alone
faithful            the fork and the plugin, draft-extend captured with inert tracking
exempt              the fork and the plugin, draft-extend captured without tracking
fast                the fork after ``apply`` and ``INKLING_SCONV=fast``
checkpoints         exempt, with the fixes ``draft-checkpoint`` and ``draft-window``
installed           (``--installed``) the installed SGLang as it is, plugin off

Each gets a server of its own, one after the other; a round begins with another one. On a host that
others use, figures that were taken minutes apart do not compare: with ``--turns`` all servers run
at once, and are asked in turns. Figures are medians with half the distance of the quartiles. Whose
they are:

start-up            from the start of the process to the first healthy answer. Whoever is first
                    compiles for the others where caches are cold: see ``--rounds``
first token, tokens/s   SGLang's own client, ``sglang.benchmark.serving``, on an emptied cache
per decode step     SGLang's own ``/start_profile``, the torch profiler: kernels, copies and fills
in turns            this script's clock: an answer's time, prefill included, by its verifications

Equality is to the bit, each contender against the first: output tokens, tokens per decode step,
the histogram of accepted drafts, target logprobs; on an empty cache, and on prefixes that decoding
made. Drafts are seen through how many of them are accepted; HTTP shows no more of them. Where the
draft's checkpoints are kept, other drafts are accepted on a cached prefix: that is what for. With
``--turns``: output tokens, the histogram and logprobs, on an empty cache.

    python benchmark/bench_server.py --quick --contenders exempt faithful --json out.json
    python benchmark/bench_server.py --earlier out.json --contenders fast --json all.json
    python benchmark/bench_server.py --turns 50 --contenders exempt checkpoints --json turns.json
    python benchmark/bench_server.py --earlier all.json --contenders --plot out.svg   # no GPU

Exit 0: all was measured, and nothing differs; 1: something differs, or a server failed; 2: this
machine cannot tell.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test/registered/inkling"))

import decode_trace
from decode_trace import GraphKind, Profile, TraceError
from inkling_sconv import plugin
from inkling_sconv.proof import checkpoint, equality, verify
from inkling_sconv.proof.server import BASE_OPTIONS, HOST, MTP_OPTIONS, Server, ServerError
from rich.console import Console
from rich.table import Table

APPLIED, FAITHFUL, EXEMPT, FAST = "guard in the file", "faithful", "exempt", "fast"
CHECKPOINTS, INSTALLED = "checkpoints", "installed"
CONTENDERS = (APPLIED, FAITHFUL, EXEMPT, FAST, CHECKPOINTS)
ACCEPTED_ON_HITS = "accepted drafts, cached prefix"
IN_TURNS = ", in turns"
BATCHES = (1, 8)
PROMPTS, NEW_TOKENS = 6, 300
# Around the checkpoint distance of 128: short of it, on it, past several of it.
LENGTHS = (100, 128, 333, 700, 1025, 1400)
SUFFIX, SUFFIX_TOKENS = 150, 96
FIRST_TOKEN_LENGTHS, FIRST_TOKEN_REQUESTS = (128, 1024), 24
OUTPUT_TOKENS = 512
PROFILED_STEPS = 30
# More than the profiled steps can give, all drafts accepted: the trace is whole when it answers.
PROFILED_TOKENS = 200
CLIENT = "sglang.benchmark.serving"


class BenchError(RuntimeError):
    """What a user can mend, in one line."""


class ClientError(RuntimeError):
    """SGLang's client gave no figure, in one line that ends with its log's path."""


# --- contenders -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A name, and the environment that makes a server it."""

    name: str
    environment: dict[str, str]


def contenders(names: Sequence[str]) -> list[Contender]:
    """The contenders of these names; forks are made where one needs them.

    Raises:
        BenchError: the installed SGLang or plugin does not allow it.
    """
    import harness
    from inkling_sconv.codemod import shape
    from inkling_sconv.trees.tree import TreeError

    if {*names} - {APPLIED, INSTALLED} and not (plugin.is_installed() and plugin.is_allowed()):
        raise BenchError("SGLang would not load the plugin here: python -m inkling_sconv says why")
    crashing = applied = Path()
    if {*names} - {INSTALLED}:
        try:
            if shape.read_shape(find(None).backend.read_bytes()) is source.Shape.EXEMPT:
                raise BenchError(
                    "draft-extend is exempt in the installed SGLang, and no crashing fork can be "
                    "made of it: --contenders --installed"
                )
            crashing = harness.make_crashing_fork()
            applied = harness.make_applied_tree(crashing)
        except (TreeError, source.RefusedError, AssertionError) as error:
            raise BenchError(f"no crashing fork of the installed SGLang: {error}") from None
    alone = {"INKLING_SCONV": "auto", "INKLING_SCONV_FIXES": "none"}
    made = {
        APPLIED: (applied, {"INKLING_SCONV": "off"}),
        FAITHFUL: (crashing, {**alone, "INKLING_SCONV_DRAFT_EXTEND": "inert"}),
        EXEMPT: (crashing, alone),
        FAST: (applied, {**alone, "INKLING_SCONV": "fast"}),
        CHECKPOINTS: (crashing, {**alone, "INKLING_SCONV_FIXES": "draft-checkpoint,draft-window"}),
    }
    return [
        Contender(name, {"INKLING_SCONV": "off"})
        if name == INSTALLED
        else Contender(name, harness.make_environment(made[name][0], **made[name][1]))
        for name in names
    ]


# --- measures -------------------------------------------------------------------------------------


def answers(server: Server, vocabulary: int) -> dict[str, Any]:
    """What has to be the same with every contender; lists with an entry per request."""
    prompts = equality.draw_prompts(PROMPTS, LENGTHS, vocabulary)
    steps, streamed = [], []
    for prompt in prompts:
        readings = []
        for _ in range(2):
            server.flush()
            readings.append(server.stream(prompt, NEW_TOKENS))
        # SGLang may send two steps as one where its client is slow, never one as two.
        groups = max(readings, key=len)
        steps.append([len(group) for group in groups])
        streamed.append([*chain.from_iterable(groups)])
    server.flush()
    cold = server.generate(prompts, NEW_TOKENS)
    suffixes = equality.draw_prompts(PROMPTS, [SUFFIX], vocabulary, seed=1)
    hits = []
    for prompt, answer, suffix in zip(prompts, cold, suffixes, strict=True):
        prefix = [*prompt, *answer["output_ids"]]
        hits += server.generate([[*prefix, *suffix]], SUFFIX_TOKENS, scored_from=len(prefix))
    if not all(answer["meta_info"]["cached_tokens"] for answer in hits):
        raise server.make_error("the prefix cache was not hit")
    return {
        "output tokens": [*streamed, *(answer["output_ids"] for answer in (*cold, *hits))],
        "tokens per decode step": steps,
        "accepted drafts, empty cache": [accepted(answer) for answer in cold],
        ACCEPTED_ON_HITS: [accepted(answer) for answer in hits],
        "logprobs, empty cache": [logprobs(answer) for answer in cold],
        "logprobs, cached prefix": [logprobs(answer) for answer in hits],
        "accept length": equality.compute_accept_length(cold),
    }


def accepted(answer: dict[str, Any]) -> list[int]:
    """Verifications, and how many of them accepted no draft, one, two, as far as SGLang says."""
    meta = answer["meta_info"]
    histogram = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram") or []
    return [meta.get("spec_verify_ct", 0), *histogram]


def logprobs(answer: dict[str, Any]) -> list[float | None]:
    """Of the prompt as far as it was scored, then of the output; None was a NaN, or the first."""
    meta = answer["meta_info"]
    scored = [*(meta.get("input_token_logprobs") or ())[1:], *meta["output_token_logprobs"]]
    return [entry[0] for entry in scored]


def compare(name: str, theirs: dict[str, Any], mine: dict[str, Any]) -> list[equality.Comparison]:
    """One comparison for each of ``answers``; what is no number differs from everything."""

    def floats(lists: list[list[Any]]) -> list[list[float]]:
        return [[math.nan if value is None else value for value in values] for values in lists]

    return [
        equality.compare(f"{name}: {what}", floats(theirs[what]), floats(mine[what]))
        for what, values in theirs.items()
        if isinstance(values, list) and not (CHECKPOINTS in name and what == ACCEPTED_ON_HITS)
    ]


def client(
    server: Server,
    model: Path,
    log: Path,
    *,
    requests: int,
    inputs: int,
    outputs: int,
    at_once: int,
) -> dict[str, Any]:
    """One run of SGLang's own client: what it writes, with its details.

    In this process: it takes SGLang 13 s to be imported.

    Raises:
        ClientError: it failed, or not every request was answered.
    """
    serving = importlib.import_module(CLIENT)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        arguments = [
            "--backend=sglang",
            f"--base-url={server.url}",
            f"--model={model}",
            "--dataset-name=random-ids",
            "--tokenize-prompt",
            f"--num-prompts={requests}",
            f"--random-input-len={inputs}",
            f"--random-output-len={outputs}",
            "--random-range-ratio=1",
            f"--max-concurrency={at_once}",
            "--flush-cache",
            "--disable-tqdm",
            "--output-details",
            f"--output-file={out}",
        ]
        before = sys.argv
        with (
            log.open("a") as written,
            contextlib.redirect_stdout(written),
            contextlib.redirect_stderr(written),
        ):
            sys.argv = [CLIENT, *arguments]
            try:
                serving.cli_main()
            # It is another program: whatever it raises, this contender has no figure.
            except (Exception, SystemExit) as error:
                what = f"{type(error).__name__}: {str(error)[:200]!r}"
                raise ClientError(f"{CLIENT}: {what}; log: {log}") from None
            finally:
                sys.argv = before
        result: dict[str, Any] = json.loads(out.read_text())
    if result["completed"] != requests or any(result["errors"]):
        answered = f"{result['completed']} of {requests} requests answered"
        raise ClientError(f"{CLIENT}: {answered}; log: {log}")
    return result


def profiled(server: Server, vocabulary: int, batch: int, folder: Path) -> Profile:
    """Decode steps of ``batch`` requests under SGLang's own profiler; ``folder`` keeps the trace.

    Raises:
        ServerError: as ``Server.post``.
        TraceError: there is not one trace, or as of ``decode_trace``.
    """
    prompts = equality.draw_prompts(batch, [128], vocabulary, seed=2)
    server.flush()
    # Once without it: what is compiled at a first use is no step's.
    server.generate(prompts, 16)
    server.flush()
    request = {
        "output_dir": str(folder),
        "num_steps": PROFILED_STEPS,
        "activities": ["CPU", "GPU"],
        "profile_by_stage": True,
        "with_stack": False,
        "record_shapes": False,
    }
    server.post("/start_profile", request)
    server.generate(prompts, PROFILED_TOKENS)
    traces = [path for path in folder.iterdir() if "decode" in path.name.lower()]
    if len(traces) != 1:
        raise TraceError(f"{folder}: {len(traces)} traces of decode steps in it")
    return decode_trace.profile(decode_trace.read(traces[0]), batch, traces[0])


@dataclass
class Result:
    """What was measured of one contender: figures by name, each a list."""

    figures: dict[str, list[float]] = field(default_factory=dict)
    graphs: dict[str, list[GraphKind]] = field(default_factory=dict)
    marks: str = ""
    unplaced: int = 0
    answers: dict[str, Any] = field(default_factory=dict)
    plugin: str = ""
    error: str | None = None

    def add(self, figure: str, *values: float) -> None:
        self.figures.setdefault(figure, []).extend(values)


def measure(
    contender: Contender,
    result: Result,
    model: Path,
    vocabulary: int,
    options: argparse.Namespace,
    say: Callable[[str], None],
    **server: Any,
) -> None:
    """One server of ``contender``, from its start to its end; adds to ``result``.

    Raises:
        ServerError: as ``Server``.
    """
    start = time.perf_counter()
    with server_of(contender, model, options.log_dir, **server) as running:
        result.add("start-up, s", time.perf_counter() - start)
        result.plugin = said(running.log)
        say(f"{contender.name}: answers to compare")
        result.answers = result.answers or answers(running, vocabulary)

        # Another server would take minutes: one failure does not keep the rest from being measured.
        def failed(error: Exception) -> None:
            result.error = str(error)
            say(f"{contender.name}: failed: {error}")

        if not options.quick:
            try:
                timed(contender, result, running, model, options, say)
            except ClientError as error:
                failed(error)
        # Last: once started, the profiler's hooks stay in the server.
        for batch in options.batches:
            say(f"{contender.name}: {PROFILED_STEPS} decode steps of {requests(batch)}, profiled")
            folder = tempfile.mkdtemp(
                prefix=f"trace-{stem(contender)}-{batch}-", dir=options.log_dir
            )
            try:
                steps = profiled(running, vocabulary, batch, Path(folder))
            except TraceError as error:
                failed(error)
                continue
            of = f"per decode step, {requests(batch)}"
            result.add(f"launches {of}", *steps.operations)
            result.add(f"GPU us {of}", *steps.microseconds)
            for part, values in steps.parts.items():
                result.add(f"  {part}: launches, {requests(batch)}", *values["operations"])
                result.add(f"  {part}: GPU us, {requests(batch)}", *values["microseconds"])
            result.graphs[str(batch)] = steps.graphs
            result.marks = steps.marks
            result.unplaced += steps.unplaced


def timed(
    contender: Contender,
    result: Result,
    running: Server,
    model: Path,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    """First tokens, and tokens/s, by SGLang's own client; adds to ``result``.

    Raises:
        ClientError: as ``client``.
    """
    log = options.log_dir / f"client-{stem(contender)}.log"
    for length in FIRST_TOKEN_LENGTHS:
        say(f"{contender.name}: first tokens of {FIRST_TOKEN_REQUESTS} prompts of {length}")
        # SGLang's client takes the first text for the first token. A tiny vocabulary has single
        # bytes that are no text yet: about one prompt in sixteen counts a token more.
        measured = client(
            running,
            model,
            log,
            requests=FIRST_TOKEN_REQUESTS,
            inputs=length,
            outputs=8,
            at_once=1,
        )
        milliseconds = [seconds * 1e3 for seconds in measured["ttfts"]]
        result.add(f"first token, prompt of {length}, ms", *milliseconds)
    for batch in options.batches:
        say(f"{contender.name}: tokens/s, {requests(batch)} at once")
        for _ in range(options.repetitions):
            measured = client(
                running,
                model,
                log,
                requests=2 * batch,
                inputs=128,
                outputs=OUTPUT_TOKENS,
                at_once=batch,
            )
            figure = f"output tokens/s, {requests(batch)} at once"
            result.add(figure, measured["output_throughput"])


def in_turns(
    entrants: Sequence[Contender],
    results: dict[str, Result],
    model: Path,
    vocabulary: int,
    options: argparse.Namespace,
    say: Callable[[str], None],
    write: Callable[[], None],
    **server: Any,
) -> None:
    """Servers of all entrants, and the same answers of each in turns; adds to ``results``.

    Every other turn goes backwards.
    """
    running: dict[str, Server] = {}

    def failed(name: str, error: ServerError) -> None:
        results[name].error = str(error)
        say(f"{name}: failed: {error}")

    with contextlib.ExitStack() as stack:
        for entrant in entrants:
            say(f"{entrant.name}: starting a server")
            one = server_of(entrant, model, options.log_dir, **server)
            try:
                running[entrant.name] = stack.enter_context(one)
            except ServerError as error:
                failed(entrant.name, error)
            else:
                results[entrant.name].plugin = said(one.log)
        # What is compiled at a first use is no step's: turn 0 gives the answers to compare.
        for turn in range(options.turns + 1):
            for name in [*running][:: -1 if turn % 2 else 1]:
                try:
                    one_turn(running[name], results[name], vocabulary, options.batches, turn)
                except ServerError as error:
                    failed(name, error)
                    del running[name]
            # Whoever has bounded our time still gets what there is.
            write()
            if turn % 10 == 0:
                say(f"turn {turn} of {options.turns}")


def one_turn(
    server: Server, result: Result, vocabulary: int, batches: Sequence[int], turn: int
) -> None:
    """Answers to each number of requests, and the time they took.

    Raises:
        ServerError: as ``Server``.
    """
    answers: dict[str, list[Any]] = {}
    for batch in batches:
        prompts = equality.draw_prompts(batch, [128], vocabulary, seed=3)
        server.flush()
        start = time.perf_counter()
        answered = server.generate(prompts, OUTPUT_TOKENS)
        milliseconds = (time.perf_counter() - start) * 1e3
        if turn:
            # They run at once: as many steps as the slowest of them took.
            steps = max(accepted(answer)[0] for answer in answered)
            if not steps:
                raise server.make_error("/generate: no spec_verify_ct, which counts the steps")
            figure = f"ms per decode step, {requests(batch)}{IN_TURNS}"
            result.add(figure, milliseconds / steps)
            continue
        for what, read in (
            ("output tokens", lambda answer: answer["output_ids"]),
            ("accepted drafts, empty cache", accepted),
            ("logprobs, empty cache", logprobs),
        ):
            answers.setdefault(what, []).extend(map(read, answered))
    # Half of them would be no others' answers.
    result.answers = result.answers or answers


def server_of(contender: Contender, model: Path, logs: Path, **server: Any) -> Server:
    """The server of ``contender``, not started yet."""
    log = logs / f"server-{stem(contender)}.log"
    options = (*BASE_OPTIONS, *MTP_OPTIONS)
    return Server(model, options, log, environment=contender.environment, **server)


def stem(contender: Contender) -> str:
    """Its name in file names."""
    return contender.name.replace(" ", "-")


def said(log: Path) -> str:
    """The plugin's own line in a server's log; empty if there is none."""
    found = re.search(r"inkling_sconv \d.*", log.read_text(errors="replace"))
    return found.group() if found else ""


def requests(count: int) -> str:
    return f"{count} request{'s' if count > 1 else ''}"


# --- report ---------------------------------------------------------------------------------------


def middle(figures: Sequence[float]) -> tuple[float, float]:
    """Median, and half the distance of the quartiles."""
    if len(figures) < 2:
        return figures[0], 0.0
    low, median, high = statistics.quantiles(figures, n=4, method="inclusive")
    return median, (high - low) / 2


def figures_table(results: dict[str, Result]) -> Table:
    """Figures by contenders; in each cell the median, its spread, and times the first one's."""
    table = Table(title="medians ± half the quartiles' distance", title_justify="left")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    base, *_ = results.values()
    for figure in dict.fromkeys(chain.from_iterable(one.figures for one in results.values())):
        cells = []
        for result in results.values():
            if not result.figures.get(figure):
                cells.append("-")
                continue
            median, spread = middle(result.figures[figure])
            places = 1 if median >= 10 else 2
            cell = f"{median:.{places}f} ±{spread:.{places}f}"
            of = middle(base.figures[figure])[0] if base.figures.get(figure) else 0
            cells.append(f"{cell} {median / of:5.2f}x" if of else cell)
        table.add_row(figure, *cells)
    lengths = [result.answers.get("accept length") for result in results.values()]
    if any(lengths):
        table.add_row("accept length", *("-" if one is None else f"{one:.2f}" for one in lengths))
    return table


def graphs_table(results: dict[str, Result]) -> Table:
    table = Table(title="graph launches of decode steps, alike by name", title_justify="left")
    for heading in ("", "requests", "graph", "launches in it", "GPU us", "us, first to last"):
        table.add_column(heading, justify="left" if heading in ("", "graph") else "right")
    table.add_column("per step", justify="right")
    for name, result in results.items():
        for batch, graphs in result.graphs.items():
            for graph in graphs:
                table.add_row(
                    name,
                    batch,
                    graph.kind,
                    str(graph.operations),
                    f"{graph.microseconds:.1f}",
                    f"{graph.elapsed:.1f}",
                    f"{graph.per_step:.2f}",
                )
    return table


def equality_table(comparisons: Sequence[equality.Comparison]) -> Table:
    table = Table(title="to the bit", title_justify="left")
    for heading in ("", "compared", "differ", "largest"):
        table.add_column(heading, justify="right" if heading else "left")
    for one in comparisons:
        table.add_row(one.name, str(one.compared), str(one.differing), f"{one.largest:g}")
    return table


def plot(results: dict[str, Result], batches: Sequence[int], title: str, path: Path) -> None:
    """Launches and microseconds per decode step, a bar for each contender and batch size.

    A contender without a profile is left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measures = ("launches", "GPU us")
    needed = {f"{one} per decode step, {requests(batch)}" for one in measures for batch in batches}
    results = {name: one for name, one in results.items() if needed <= {*one.figures}}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    for axis, measure in zip(axes, measures, strict=True):
        for turn, batch in enumerate(batches):
            key = f"{measure} per decode step, {requests(batch)}"
            middles = [middle(one.figures[key]) for one in results.values()]
            places = [place + turn * 0.8 / len(batches) for place in range(len(results))]
            bars = axis.bar(
                places,
                [median for median, _ in middles],
                width=0.8 / len(batches),
                yerr=[spread for _, spread in middles],
                align="edge",
                label=requests(batch),
            )
            axis.bar_label(bars, fmt="%.0f", fontsize=8)
        axis.set_xticks([place + 0.4 for place in range(len(results))], [*results])
        axis.set(title=f"{measure} per decode step")
        axis.grid(axis="y", alpha=0.3)
    axes[-1].legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def machine() -> dict[str, str]:
    from importlib.metadata import version

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "device": device,
        "python": platform.python_version(),
        **{name: version(name) for name in ("sglang", "torch", "triton")},
    }


# --- one run --------------------------------------------------------------------------------------


def earlier(path: Path) -> tuple[dict[str, str], dict[str, Result]]:
    """The machine and the contenders of an earlier run's JSON.

    Raises:
        BenchError: it is none.
    """
    try:
        report = json.loads(path.read_text())
        about = dict(report["machine"])
        results = {name: Result(**fields) for name, fields in report["contenders"].items()}
        for result in results.values():
            result.graphs = {
                batch: [GraphKind(**graph) for graph in graphs]
                for batch, graphs in result.graphs.items()
            }
    except OSError as error:
        raise BenchError(f"--earlier {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BenchError(f"--earlier {path}: not what --json writes") from None
    return about, results


def run(
    options: argparse.Namespace, entrants: Sequence[Contender], console: Console, **server: Any
) -> int:
    """Measure ``entrants``, print and write what is asked for; the exit code.

    ``server`` goes to ``Server``.
    """
    results: dict[str, Result] = {}
    if options.earlier:
        about, results = earlier(options.earlier)
        in_turns_too = any(IN_TURNS in name for one in results.values() for name in one.figures)
        if in_turns_too and (entrants or options.plot):
            raise BenchError(f"--earlier {options.earlier}: of --turns: can be shown, no more")
    if entrants:
        here = machine()
        if options.earlier and about != here:
            raise BenchError(f"--earlier {options.earlier}: measured on {about}, not on {here}")
        about = here
    title = ", ".join(f"{name} {value}" for name, value in about.items())
    console.print(f"{title}\nlogs and traces: {options.log_dir}" if entrants else title)
    results |= {entrant.name: Result() for entrant in entrants}
    start = time.monotonic()

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - start:5.0f} s  {what}", highlight=False)

    def write(comparisons: Sequence[equality.Comparison] = ()) -> None:
        if options.json:
            report = {
                "machine": about,
                "command": " ".join(sys.argv),
                "contenders": {name: asdict(result) for name, result in results.items()},
                "comparisons": [asdict(one) for one in comparisons],
            }
            replace.write(options.json, json.dumps(report).encode())

    with tempfile.TemporaryDirectory(prefix="bench_server_") as folder:
        model = Path(folder) / "tiny"
        if entrants:
            checkpoint.write_checkpoint(model)
        if options.turns:
            vocabulary = verify.read_vocabulary_size(model)
            in_turns(entrants, results, model, vocabulary, options, say, write, **server)
        for turn in range(options.rounds if entrants and not options.turns else 0):
            first = turn % len(entrants)
            for entrant in (*entrants[first:], *entrants[:first]):
                result = results[entrant.name]
                say(f"{entrant.name}: starting a server")
                try:
                    measure(
                        entrant,
                        result,
                        model,
                        verify.read_vocabulary_size(model),
                        options,
                        say,
                        **server,
                    )
                except ServerError as error:
                    result.error = str(error)
                    say(f"{entrant.name}: failed: {error}")
                # Now: whoever has bounded our time still gets what there is.
                write()

    base, *others = [(name, one.answers) for name, one in results.items() if one.answers] or [None]
    comparisons = [
        one for name, theirs in others for one in compare(f"{name}, {base[0]}", base[1], theirs)
    ]
    write(comparisons)
    if any(result.figures for result in results.values()):
        console.print(figures_table(results))
    if any(result.graphs for result in results.values()):
        console.print(graphs_table(results))
    if comparisons:
        console.print(equality_table(comparisons))
    for name, result in results.items():
        console.print(f"{name}: {result.plugin or 'no line of the plugin'}", highlight=False)
        if result.unplaced:
            console.print(f"{name}: {result.unplaced} GPU operations without a launch, left out")
    if options.plot:
        plot(results, options.batches, title, options.plot)
    failed = [entrant.name for entrant in entrants if results[entrant.name].error]
    differing = [one.name for one in comparisons if not one.exact]
    for name in failed:
        console.print(f"failed: {name}: {results[name].error}", highlight=False)
    for name in differing:
        console.print(f"differs: {name}", highlight=False)
    if comparisons and not differing:
        compared = sum(one.compared for one in comparisons)
        console.print(f"0 of {compared} values differ from those of {base[0]}")
    return 1 if failed or differing else 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench_server: {message}\n")


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _batch(text: str) -> int:
    if not _count(text) <= 8:
        raise argparse.ArgumentTypeError(f"{text}: the servers take 8 requests at once")
    return int(text)


def _output(text: str) -> Path:
    # Through a link: what is written takes the place of what is there.
    path = Path(text).resolve()
    if (path.exists() and not path.is_file()) or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: not a file in a folder that is there")
    return path


def _picture(text: str) -> Path:
    path = _output(text)
    if path.suffix not in (".pdf", ".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text}: not a .pdf, .png or .svg")
    return path


def arguments(command_line: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="bench_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--contenders", nargs="*", default=list(CONTENDERS), choices=CONTENDERS, metavar="NAME"
    )
    parser.add_argument("--installed", action="store_true", help="the installed SGLang too")
    parser.add_argument("--rounds", type=_count, default=1, help="servers of each contender")
    parser.add_argument(
        "--turns", type=_count, metavar="N", help="only this: all servers at once, N turns"
    )
    parser.add_argument("--quick", action="store_true", help="equality and profile alone")
    parser.add_argument("--batches", type=_batch, nargs="+", default=list(BATCHES), metavar="N")
    parser.add_argument("--repetitions", type=_count, default=5, help="of tokens/s")
    parser.add_argument("--earlier", type=Path, metavar="JSON", help="beside an earlier run's")
    parser.add_argument("--json", type=_output, metavar="OUT")
    parser.add_argument("--plot", type=_picture, metavar="OUT", help="a .pdf, .png or .svg")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="default: a temporary folder")
    options = parser.parse_args(command_line)
    if options.turns and (options.earlier or options.plot):
        parser.error("--turns: not beside an earlier run, and there is no profile to plot")
    return options


def lacking(options: argparse.Namespace, names: Sequence[str]) -> str | None:
    """What this machine lacks for what is asked; None if nothing."""
    if names and (machine_lacks := verify.why_unavailable()) is not None:
        return machine_lacks
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        return "--plot: matplotlib is not installed for this Python"
    if names and not (options.quick or options.turns):
        try:
            importlib.import_module(CLIENT)
        except ImportError as error:
            return f"SGLang's client does not import: {error}; --quick does without"
    return None


def log_folder(path: Path | None) -> Path:
    """``path``, or a temporary folder: it is there.

    Raises:
        BenchError: it cannot be made.
    """
    if path is None:
        return Path(tempfile.mkdtemp(prefix="bench_server_logs_"))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--log-dir {path}: {error.strerror}") from None
    # The server has it by name, for its traces.
    return path.resolve()


@contextlib.contextmanager
def clean_environment() -> Iterator[None]:
    """None of our variables but a contender's own, and no proxy to this machine."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("INKLING_SCONV")]:
        del os.environ[name]
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = HOST
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(command_line: Sequence[str] | None = None) -> int:
    options = arguments(command_line)
    names = [*dict.fromkeys(options.contenders), *([INSTALLED] if options.installed else [])]
    try:
        with clean_environment():
            if not names and not options.earlier:
                raise BenchError("no contenders")
            # What is there already is shown on any machine.
            if (lack := lacking(options, names)) is not None:
                raise BenchError(lack)
            if names:
                options.log_dir = log_folder(options.log_dir)
            console = Console(width=None if sys.stdout.isatty() else 220)
            entrants = contenders(names) if names else []
            # As Ctrl-C does it: the server is ended on the way out.
            for number in (signal.SIGTERM, signal.SIGHUP) if names else ():
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, signal.default_int_handler)
            return run(options, entrants, console)
    except BenchError as error:
        print(f"bench_server: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench_server: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""What one decode step costs on the GPU: launches and microseconds, and which kernels come and go.

Each contender gets servers of its own on the tiny Inkling with MTP and CUDA graphs. SGLang's own
``/start_profile`` (the torch profiler) records decode steps. A step has parts: the graph that
verifies, the draft-extend graph, other graphs, and launches outside graphs. The tiny server is
bound by its host, so this times kernels, not answers.

A contender is one of

stock         the installed SGLang, plugin off
default       the installed SGLang with the plugin and nothing set
guard         the crashing fork after ``inkling-sconv apply``, plugin off
exempt        the crashing fork with the plugin, no fix
inert         the same with ``INKLING_SCONV_DRAFT_EXTEND=inert``
[fast+]FIXES  the installed SGLang with these fixes, such as ``fast+draft-checkpoint,draft-window``

The crashing fork is made of the installed SGLang: as it was between #34043 and #35042.

Every contender's output tokens and logprobs, on an empty cache and after a prefix hit, are compared
with the first contender's to the bit; so are the tokens per decode step on an empty cache.

    python benchmark/bench_decode_step.py stock default --json out.json

Exit 0: everything was measured, and nothing differs; 1: something differs, or a server failed; 2:
this machine cannot run it.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "test/registered/inkling"))

from decode_trace import PARTS, Profile, TraceError, profile_steps, read_events
from inkling_sconv.errors import UserError
from inkling_sconv.plugin import settings
from inkling_sconv.plugin.fixes import FIXES
from inkling_sconv.proof import checkpoint, equality, verify
from inkling_sconv.proof.server import BASE_OPTIONS, MTP_OPTIONS, Server, ServerError
from inkling_sconv.trees.replacement import write_file
from rich.console import Console
from rich.table import Table
from summary import format_summary, summarize

STOCK, DEFAULT, GUARD, EXEMPT, INERT = "stock", "default", "guard", "exempt", "inert"
NAMES = (STOCK, DEFAULT, GUARD, EXEMPT, INERT)
FIX_NAMES = [fix.name for fix in FIXES]
SUFFIX_TOKENS = 96
PROFILED_STEPS = 30
# More than the profiled steps can give if every draft is accepted: the trace is whole by then.
PROFILED_TOKENS = 200


def make_contender_environment(name: str) -> dict[str, str]:
    """The variables with which a server is the contender ``name``; its fork is made if need be.

    Raises:
        UserError: no crashing fork can be made of the installed SGLang.
    """
    if name == STOCK:
        return {"INKLING_SCONV": "off"}
    if name == DEFAULT:
        return {}
    if name not in NAMES:
        mode, plus, fixes = name.rpartition("+")
        return {"INKLING_SCONV": mode if plus else "auto", "INKLING_SCONV_FIXES": fixes}
    import harness

    crashing = harness.make_crashing_fork()
    if name == GUARD:
        applied = harness.make_applied_tree(crashing)
        return harness.make_environment(applied, INKLING_SCONV="off")
    form = "inert" if name == INERT else "exempt"
    variables = {"INKLING_SCONV_FIXES": "none", "INKLING_SCONV_DRAFT_EXTEND": form}
    return harness.make_environment(crashing, **variables)


def collect_answers(server: Server, vocabulary: int) -> dict[str, list[list[float]]]:
    """What must be the same for every contender: lists with an entry per request."""
    prompts = equality.draw_prompts(verify.PROMPTS, verify.LENGTHS, vocabulary)
    steps = []
    for prompt in prompts:
        server.flush()
        steps.append([float(len(group)) for group in server.stream(prompt, verify.NEW_TOKENS)])
    server.flush()
    cold = server.generate(prompts, verify.NEW_TOKENS)
    suffixes = equality.draw_prompts(verify.PROMPTS, [verify.SUFFIX], vocabulary, seed=1)
    hits = []
    for prompt, answer, suffix in zip(prompts, cold, suffixes, strict=True):
        prefix = [*prompt, *answer["output_ids"]]
        hits += server.generate([[*prefix, *suffix]], SUFFIX_TOKENS, scored_from=len(prefix))
    if not all(answer["meta_info"]["cached_tokens"] for answer in hits):
        raise server.make_error("the prefix cache was not hit")
    return {
        "tokens per decode step": steps,
        "output tokens": [answer["output_ids"] for answer in (*cold, *hits)],
        "logprobs": [equality.read_logprobs(answer, "output") for answer in (*cold, *hits)]
        + [equality.read_logprobs(answer, "input") for answer in hits],
    }


def record_profile(server: Server, vocabulary: int, batch: int, folder: Path) -> Profile:
    """Profile decode steps of ``batch`` requests; ``folder`` keeps the trace.

    Raises:
        ServerError: as ``Server.post``.
        TraceError: there is not exactly one trace, or as ``profile_steps``.
    """
    prompts = equality.draw_prompts(batch, [128], vocabulary, seed=2)
    server.flush()
    # Once without the profiler: what is compiled at its first use belongs to no step.
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
    return profile_steps(read_events(traces[0]), batch, traces[0])


def summarize_profile(profile: Profile) -> dict[str, Any]:
    """``launches`` and ``us`` of a whole step and of each part."""
    whole_launches = [sum(step) for step in zip(*profile.launches.values(), strict=True)]
    whole_us = [sum(step) for step in zip(*profile.microseconds.values(), strict=True)]
    return {
        "launches": {
            "step": summarize(whole_launches),
            **{part: summarize(values) for part, values in profile.launches.items()},
        },
        "us": {
            "step": summarize(whole_us),
            **{part: summarize(values) for part, values in profile.microseconds.items()},
        },
        "unplaced": profile.unplaced,
    }


def measure(
    name: str,
    environment: dict[str, str],
    model: Path,
    options: argparse.Namespace,
    say: Callable[[str], None],
    **server: Any,
) -> tuple[dict[str, Any], dict[str, list[list[float]]], dict[int, Profile]]:
    """Start servers of contender ``name``: its record, its answers, and a profile a batch size.

    Never raises for what the server does: the record's ``error`` has it.
    """
    found: dict[str, Any] = {"batches": {}, "error": None}
    answers: dict[str, list[list[float]]] = {}
    profiles: dict[int, Profile] = {}
    vocabulary = verify.read_vocabulary_size(model)
    stem = name.replace("+", "-").replace(",", "-")
    everything = (*BASE_OPTIONS, *MTP_OPTIONS)
    try:
        # A server a batch size: SGLang 0.5.17 can crash when it is profiled a second time.
        for batch in options.batches:
            log = options.log_dir / f"server-{stem}-{batch}.log"
            start = time.perf_counter()
            with Server(model, everything, log, environment=environment, **server) as running:
                found.setdefault("start-up, s", round(time.perf_counter() - start, 1))
                say(f"{name}: comparing answers")
                answers = answers or collect_answers(running, vocabulary)
                say(f"{name}: profiling {PROFILED_STEPS} decode steps of {batch} requests")
                folder = tempfile.mkdtemp(prefix=f"trace-{batch}-", dir=options.log_dir)
                profiles[batch] = record_profile(running, vocabulary, batch, Path(folder))
                found["batches"][str(batch)] = summarize_profile(profiles[batch])
    except (ServerError, TraceError) as error:
        found["error"] = str(error)
        say(f"{name}: failed: {error}")
    return found, answers, profiles


def make_table(contenders: dict[str, Any], batches: Sequence[int]) -> Table:
    """Launches and GPU microseconds per decode step, contender by contender."""
    table = Table(title="per decode step: median (half the distance of the quartiles)")
    for heading in ("requests", "part", "figure", *contenders):
        table.add_column(heading)
    for batch in map(str, batches):
        for part in ("step", *PARTS):
            for figure, places in (("launches", 0), ("us", 1)):
                cells = [
                    one["batches"].get(batch, {figure: {}})[figure].get(part)
                    for one in contenders.values()
                ]
                if any(cells):
                    shown = (format_summary(cell, places) if cell else "-" for cell in cells)
                    table.add_row(batch, part, figure, *shown)
    return table


def list_kernel_changes(base: Profile, other: Profile) -> list[tuple[str, str, float]]:
    """Part, kernel name, and how many more of it ``other`` runs per step."""
    changes = []
    for part in PARTS:
        mine, theirs = (one.kernels.get(part, {}) for one in (base, other))
        for name in sorted({*mine, *theirs}):
            if (more := theirs.get(name, 0) - mine.get(name, 0)) != 0:
                changes.append((part, name, round(more, 2)))
    return changes


def run(options: argparse.Namespace, console: Console, **server: Any) -> int:
    """Measure every contender, print, write what is asked for, and return the exit code."""
    import torch

    environments = {name: make_contender_environment(name) for name in options.contenders}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = {"GPU": gpu, "Python": platform.python_version()}
    machine |= {name: version(name) for name in ("sglang", "torch", "triton")}
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    console.print(f"{about}\nlogs and traces: {options.log_dir}")
    start = time.monotonic()

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - start:5.0f} s  {what}", highlight=False)

    report: dict[str, Any] = {
        "machine": machine,
        "contenders": {},
        "kernel changes": [],
        "comparisons": [],
    }
    base: dict[str, list[list[float]]] = {}
    base_profiles: dict[int, Profile] = {}
    with tempfile.TemporaryDirectory(prefix="bench_decode_step_") as folder:
        model = Path(folder) / "tiny"
        checkpoint.write_checkpoint(model)
        for name, environment in environments.items():
            say(f"{name}: starting a server")
            found, answers, profiles = measure(name, environment, model, options, say, **server)
            report["contenders"][name] = found
            report["comparisons"] += [
                asdict(equality.compare(f"{name}: {what}", base[what], answers[what]))
                for what in (answers if base else {})
            ]
            report["kernel changes"] += [
                [name, batch, *change]
                for batch in {*profiles} & {*base_profiles}
                for change in list_kernel_changes(base_profiles[batch], profiles[batch])
            ]
            base, base_profiles = base or answers, base_profiles or profiles
            # After each server, so that an interrupted run keeps what it has.
            if options.json:
                write_file(options.json, json.dumps(report).encode())
    contenders = report["contenders"]
    console.print(make_table(contenders, options.batches))
    for name, batch, part, kernel, more in report["kernel changes"]:
        console.print(f"{name}, {batch} requests, {part}: {more:+.2f} {kernel}", highlight=False)
    differing = [one for one in report["comparisons"] if one["differing"] or not one["compared"]]
    for one in differing:
        console.print(f"differs: {one['name']}: {one['differing']} of {one['compared']}")
    if report["comparisons"] and not differing:
        compared = sum(one["compared"] for one in report["comparisons"])
        console.print(f"0 of {compared} values differ from {next(iter(contenders))}")
    failed = [name for name, one in contenders.items() if one["error"]]
    for name in failed:
        console.print(f"failed: {name}: {contenders[name]['error']}", highlight=False)
    return 1 if failed or differing else 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench_decode_step: {message}\n")


def _parse_contender(text: str) -> str:
    fixes = text.removeprefix("fast+").split(",")
    if text not in NAMES and not set(fixes) <= {*FIX_NAMES}:
        valid = f"{', '.join(NAMES)}, or fixes: {', '.join(FIX_NAMES)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {valid}")
    return text


def _parse_batch(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 8):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests from 1 to 8")
    return int(text)


def parse_arguments(command_line: Sequence[str] | None) -> argparse.Namespace:
    """The options; a wrong one ends the process with one line and exit 2."""
    parser = _Parser(
        prog="bench_decode_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("contenders", nargs="+", type=_parse_contender, metavar="CONTENDER")
    parser.add_argument("--batches", type=_parse_batch, nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write summaries there")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="default: a temporary folder")
    options = parser.parse_args(command_line)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: no such folder")
    return options


def main(command_line: Sequence[str] | None = None) -> int:
    """Run, as the command line says. An error of the user's is one line and exit 2."""
    options = parse_arguments(command_line)
    # A contender gets its own variables and no others.
    for name in [name for name in os.environ if name.startswith("INKLING_SCONV")]:
        del os.environ[name]
    try:
        if (reason := verify.why_unavailable()) is not None:
            raise UserError(reason)
        if not (settings.is_installed() and settings.is_allowed()):
            raise UserError("SGLang would not load the plugin: python -m inkling_sconv says why")
        options.log_dir = (options.log_dir or Path(tempfile.mkdtemp())).resolve()
        options.log_dir.mkdir(parents=True, exist_ok=True)
        # As Ctrl-C does it: the server is ended on the way out.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
        return run(options, Console(width=None if sys.stdout.isatty() else 220))
    except (UserError, OSError) as error:
        print(f"bench_decode_step: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench_decode_step: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""What one decode step costs on the GPU: launches and microseconds, and which kernels come and go.

Each contender gets servers of its own on the tiny Inkling with MTP and CUDA graphs. SGLang's own
``/start_profile`` (the torch profiler) records decode steps. A step has parts: the graph that
verifies, the draft-extend graph, other graphs, and launches outside graphs. The tiny server is
bound by its host, so this times kernels, not answers. ``contenders.py`` says what can be compared.

Every contender's output tokens and logprobs, on an empty cache and after a prefix hit, are compared
with those of the first contender with as many heads, to the bit; so are the tokens per decode step
on an empty cache.

    python benchmark/bench_decode_step.py stock default --heads 2 8 --json out.json

Exit 0: everything was measured, and nothing differs; 1: something differs, or a server failed; 2:
this machine cannot run it.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import contenders
from decode_trace import PARTS, Profile, TraceError, profile_steps, read_events
from inkling_sconv.proof import equality, verify
from inkling_sconv.proof.server import (
    BASE_OPTIONS,
    TINY_OPTIONS,
    Server,
    ServerError,
    list_mtp_options,
)
from inkling_sconv.trees.folder import write_output
from rich.console import Console
from rich.table import Table
from summary import format_summary, summarize

SUFFIX_TOKENS = 96
PROFILED_STEPS = 30
NO_PREFILL_GRAPH = "--cuda-graph-backend-prefill=disabled"


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


def record_profile(
    server: Server, vocabulary: int, batch: int, heads: int, folder: Path
) -> Profile:
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
    # More than the profiled steps can give if every draft is accepted: the trace is whole by then.
    server.generate(prompts, 2 * PROFILED_STEPS * (heads + 1))
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


def make_table(measured: dict[str, Any], batches: Sequence[int]) -> Table:
    """Launches and GPU microseconds per decode step, contender by contender."""
    table = Table(title="per decode step: median (half the distance of the quartiles)")
    for heading in ("requests", "part", "figure", *measured):
        table.add_column(heading)
    for batch in map(str, batches):
        for part in ("step", *PARTS):
            for figure, places in (("launches", 0), ("us", 1)):
                cells = [
                    one["batches"].get(batch, {figure: {}})[figure].get(part)
                    for one in measured.values()
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
    environments, machine = contenders.begin(options, console)
    start = time.monotonic()

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - start:5.0f} s  {what}", highlight=False)

    keys = [(name, heads) for heads in options.heads for name in environments]
    measured = {contenders.label(*key): {"batches": {}, "error": None} for key in keys}
    answers: dict[tuple[str, int], dict[str, list[list[float]]]] = {}
    profiles: dict[tuple[str, int, int], Profile] = {}
    report: dict[str, Any] = {"machine": machine, "contenders": measured}
    with tempfile.TemporaryDirectory(prefix="bench_decode_step_") as folder:
        models = contenders.write_models(Path(folder), options.heads)
        # Servers of their own for each batch size: SGLang 0.5.17 can crash when it is profiled a
        # second time.
        for batch in options.batches:
            servers = {}
            for name, heads in keys:
                servers[name, heads] = Server(
                    models[heads],
                    (*BASE_OPTIONS, *TINY_OPTIONS, *list_mtp_options(heads), NO_PREFILL_GRAPH),
                    contenders.make_log(options.log_dir, name, heads, batch),
                    environment=environments[name],
                    **server,
                )
            say(f"starting {len(servers)} servers for {batch} requests")
            with contenders.start_servers(servers) as failures:
                for key, running in servers.items():
                    found = measured[contenders.label(*key)]
                    try:
                        if (failure := failures[key]) is not None:
                            raise failure
                        vocabulary = verify.read_vocabulary_size(models[key[1]])
                        if key not in answers:
                            say(f"{contenders.label(*key)}: comparing answers")
                            answers[key] = collect_answers(running, vocabulary)
                        say(f"{contenders.label(*key)}: profiling {batch} requests")
                        traces = tempfile.mkdtemp(prefix=f"trace-{batch}-", dir=options.log_dir)
                        profile = record_profile(running, vocabulary, batch, key[1], Path(traces))
                        profiles[(*key, batch)] = profile
                        found["batches"][str(batch)] = summarize_profile(profile)
                    except (ServerError, TraceError) as error:
                        found["error"] = str(error)
                        say(f"{contenders.label(*key)}: failed: {error}")
            report["comparisons"] = compare_answers(answers)
            report["kernel changes"] = compare_kernels(profiles)
            # After each round, so that an interrupted run keeps what it has.
            if options.json:
                write_output(options.json, json.dumps(report).encode())
    console.print(make_table(measured, options.batches))
    for name, batch, part, kernel, more in report["kernel changes"]:
        console.print(f"{name}, {batch} requests, {part}: {more:+.2f} {kernel}", highlight=False)
    differing = [one for one in report["comparisons"] if one["differing"] or not one["compared"]]
    for one in differing:
        console.print(f"differs: {one['name']}: {one['differing']} of {one['compared']}")
    if report["comparisons"] and not differing:
        compared = sum(one["compared"] for one in report["comparisons"])
        console.print(f"0 of {compared} values differ from {options.contenders[0]}")
    failed = [name for name, one in measured.items() if one["error"]]
    for name in failed:
        console.print(f"failed: {name}: {measured[name]['error']}", highlight=False)
    return 1 if failed or differing else 0


def compare_answers(
    answers: dict[tuple[str, int], dict[str, list[list[float]]]],
) -> list[dict[str, Any]]:
    """Compare every contender's answers with those of the first with as many heads."""
    found, bases = [], {}
    for (name, heads), mine in answers.items():
        if heads not in bases:
            bases[heads] = mine
            continue
        found += [
            asdict(
                equality.compare(
                    f"{contenders.label(name, heads)}: {what}", bases[heads][what], mine[what]
                )
            )
            for what in mine
        ]
    return found


def compare_kernels(profiles: dict[tuple[str, int, int], Profile]) -> list[list[Any]]:
    """Compare every contender's kernels with those of the first with as many heads."""
    found, bases = [], {}
    for (name, heads, batch), profile in profiles.items():
        base = bases.setdefault((heads, batch), profile)
        if profile is not base:
            changes = list_kernel_changes(base, profile)
            found += [[contenders.label(name, heads), batch, *change] for change in changes]
    return found


def parse_arguments(command_line: Sequence[str] | None) -> argparse.Namespace:
    """The options; a wrong one ends the process with one line and exit 2."""
    parser = contenders.Parser("bench_decode_step", __doc__)
    parser.add_argument(
        "--batches", type=contenders.parse_count, nargs="+", default=[1, 8], metavar="N"
    )
    return parser.parse(command_line)


def main(command_line: Sequence[str] | None = None) -> int:
    """Run, as the command line says."""
    return contenders.run_as_script("bench_decode_step", parse_arguments(command_line), run)


if __name__ == "__main__":
    sys.exit(main())

"""What a user feels of the draft's conv state: answers right after a prefix hit, and without one.

Every prompt ends a few tokens past a checkpoint at 128 tokens, which is in the prefix cache. The
checkpoint was made by *decode* (the next turn of a chat, a step of an agent) or by *prefill* (a
shared system prompt, the same prompt sampled again). *cold*: the same prompts on an empty cache.
Each prompt is streamed alone, greedily. The figures are decode steps, and milliseconds from the
request to the last token, after 8, 32 and 128 tokens of the answer. ``contenders.py`` says what can
be compared.

The tiny server is bound by its host. Where a step takes longer, steps say more than its
milliseconds.

    python benchmark/bench_hits.py stock default --heads 2 8 --json out.json

Exit 0: everything was measured, and every contender gave the same tokens; 1: some differ, or a
server failed; 2: this machine cannot run it.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import contenders
from inkling_sconv.proof import equality, verify
from inkling_sconv.proof.server import (
    BASE_OPTIONS,
    TINY_OPTIONS,
    Server,
    ServerError,
    list_mtp_options,
    make_request,
)
from inkling_sconv.trees.folder import write_output
from rich.console import Console
from rich.table import Table
from summary import format_summary, summarize

CHECKPOINT = 128
DISTANCES = (1, 2, 4, 8, 16, 32, 64)
"""How many tokens of a prompt follow the checkpoint."""
ANSWERS = (8, 32, 128)
"""Lengths of an answer in tokens."""
PROMPTS = 8
DECODE, PREFILL, COLD = "decode", "prefill", "cold"


def time_answer(
    server: Server, ids: Sequence[int], cached: int
) -> tuple[list[int], list[tuple[int, float]]]:
    """Stream an answer: its tokens, and the decode steps and milliseconds until each ``ANSWERS``.

    Raises:
        ServerError: the stream breaks off, or the prompt did not reuse ``cached`` tokens.
    """
    tokens: list[int] = []
    reused = -1
    reached: list[tuple[int, float]] = []
    start = time.perf_counter()
    for step, message in enumerate(server.read_stream(make_request(list(ids), max(ANSWERS)))):
        tokens, reused = message["output_ids"], message["meta_info"]["cached_tokens"]
        elapsed = 1000 * (time.perf_counter() - start)
        while len(reached) < len(ANSWERS) and len(tokens) >= ANSWERS[len(reached)]:
            # The first message is the prefill's token.
            reached.append((step, elapsed))
    if len(reached) < len(ANSWERS):
        raise server.make_error(f"stream: {len(tokens)} tokens of {max(ANSWERS)}")
    if reused != cached:
        raise server.make_error(f"{reused} tokens of the prefix cache were reused, not {cached}")
    return tokens, reached


def make_prompts(server: Server, vocabulary: int) -> list[list[int]]:
    """Texts that decoding took across the checkpoint, long enough for every distance."""
    lengths = range(CHECKPOINT - PROMPTS, CHECKPOINT)
    inputs = equality.draw_prompts(PROMPTS, lengths, vocabulary, seed=9)
    return equality.extend_by_decoding(server, inputs, PROMPTS + max(DISTANCES) + 2)


def measure(
    server: Server, vocabulary: int, kind: str
) -> tuple[dict[str, dict[str, Any]], list[list[int]]]:
    """Figures of prompts whose checkpoint ``kind`` made, and their answers.

    By distance, ``steps`` of all prompts together and ``ms`` have an entry for each of ``ANSWERS``.
    """
    figures, answers = {}, []
    texts: list[list[int]] = []
    for distance in DISTANCES:
        # Anew for each distance, since the answers leave checkpoints of their own.
        if kind == DECODE or not texts:
            texts = make_prompts(server, vocabulary)
        prompts = [text[: CHECKPOINT + distance] for text in texts]
        if kind == PREFILL:
            server.flush()
            server.generate([prompt[: CHECKPOINT + 1] for prompt in prompts], 0)
        timed = []
        for ids in prompts:
            if kind == COLD:
                server.flush()
            tokens, reached = time_answer(server, ids, 0 if kind == COLD else CHECKPOINT)
            timed.append(reached)
            answers.append(tokens)
        by_length = [[*zip(*answers_at, strict=True)] for answers_at in zip(*timed, strict=True)]
        figures[str(distance)] = {
            "steps": [sum(steps) for steps, _ in by_length],
            "ms": [summarize(ms) for _, ms in by_length],
        }
    return figures, answers


def make_table(measured: dict[str, Any], figure: str) -> Table:
    """One figure by where the checkpoint is from, distance and answer length, by contender."""
    table = Table(
        title={"steps": "decode steps of all prompts", "ms": "ms, median (spread)"}[figure]
    )
    columns = [(name, kind) for name, one in measured.items() for kind in one["figures"]]
    for heading in ("past it", "tokens", *(f"{name}: {kind}" for name, kind in columns)):
        table.add_column(heading)
    for distance in map(str, DISTANCES):
        for place, length in enumerate(ANSWERS):
            cells = [
                measured[name]["figures"][kind][distance][figure][place] for name, kind in columns
            ]
            shown = [str(c) if figure == "steps" else format_summary(c, 1) for c in cells]
            table.add_row(distance, str(length), *shown)
    return table


def run(options: argparse.Namespace, console: Console, **server: Any) -> int:
    """Measure every contender, print, write what is asked for, and return the exit code."""
    environments, machine = contenders.begin(options, console)
    keys = [(name, heads) for heads in options.heads for name in environments]
    measured: dict[str, Any] = {}
    expected: dict[int, list[list[int]]] = {}
    differing = 0
    with tempfile.TemporaryDirectory(prefix="bench_hits_") as folder:
        models = contenders.write_models(Path(folder), options.heads)
        servers = {
            (name, heads): Server(
                models[heads],
                (*BASE_OPTIONS, *TINY_OPTIONS, *list_mtp_options(heads)),
                contenders.make_log(options.log_dir, "hits", name, heads),
                environment=environments[name],
                **server,
            )
            for name, heads in keys
        }
        console.print(f"starting {len(servers)} servers")
        with contenders.start_servers(servers) as failures:
            for (name, heads), running in servers.items():
                found: dict[str, Any] = {"figures": {}, "error": None}
                measured[contenders.label(name, heads)] = found
                try:
                    if (failure := failures[name, heads]) is not None:
                        raise failure
                    vocabulary = verify.read_vocabulary_size(models[heads])
                    # Without a hit the contenders are alike: once is enough.
                    kinds = (DECODE, PREFILL) if heads in expected else (COLD, DECODE, PREFILL)
                    for kind in kinds:
                        console.print(f"{contenders.label(name, heads)}: {kind}", highlight=False)
                        figures, answers = measure(running, vocabulary, kind)
                        found["figures"][kind] = figures
                        base = expected.setdefault(heads, answers)
                        differing += sum(a != b for a, b in zip(base, answers, strict=True))
                except ServerError as error:
                    found |= {"figures": {}, "error": str(error)}
                report = {
                    "machine": machine,
                    "prompts": PROMPTS,
                    "differing": differing,
                    "contenders": measured,
                }
                # After each server, so that an interrupted run keeps what it has.
                if options.json:
                    write_output(options.json, json.dumps(report).encode())
    whole = {name: one for name, one in measured.items() if not one["error"]}
    for heads in options.heads:
        names = [contenders.label(name, heads) for name in environments]
        of_heads = {name: whole[name] for name in names if name in whole}
        for figure in ("steps", "ms"):
            console.print(make_table(of_heads, figure))
    console.print(f"{differing} answers differ from the first contender's cold ones")
    for name, one in measured.items():
        if one["error"]:
            console.print(f"failed: {name}: {one['error']}", highlight=False)
    return 1 if differing or len(whole) < len(measured) else 0


def parse_arguments(command_line: Sequence[str] | None) -> argparse.Namespace:
    """The options; a wrong one ends the process with one line and exit 2."""
    return contenders.Parser("bench_hits", __doc__).parse(command_line)


def main(command_line: Sequence[str] | None = None) -> int:
    """Run, as the command line says."""
    return contenders.run_as_script("bench_hits", parse_arguments(command_line), run)


if __name__ == "__main__":
    sys.exit(main())

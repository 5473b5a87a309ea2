"""Start one real server with CUDA graphs, and check that its state reuse is exact."""

import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inkling_sconv.errors import UserError
from inkling_sconv.proof import equality
from inkling_sconv.proof.server import (
    BASE_OPTIONS,
    LAZY_OPTION,
    Server,
    ServerError,
    find_prefill_graph,
    list_mtp_options,
)

PROMPTS = 6
LENGTHS = (100, 128, 333, 700, 1025, 1400)
"""Lengths of the prompts in tokens: below, on, and several times the checkpoint distance of 128."""
PREFIX_LENGTHS = (130, 256, 400, 700, 1000, 1500)
"""Lengths of the prompts that are only prefilled: up to, and beyond, the largest prefill graph."""
NEW_TOKENS = 300
SUFFIX = 150
"""Tokens that are put on a cached prefix."""


@dataclass
class Result:
    """``passed`` only if every step was reached and every comparison is exact.

    Otherwise ``error`` says why, in one line. ``heads`` is 0 without speculation; ``prefill_graph``
    is what the server captured. ``distinct_tokens`` counts those of the least varied answer.
    ``log`` is the path of the server's log.
    """

    passed: bool = False
    error: str | None = None
    heads: int = 0
    prefill_graph: str = "none"
    start_seconds: float = 0.0
    seconds: float = 0.0
    accept_length: float = 0.0
    distinct_tokens: int = 0
    comparisons: list[equality.Comparison] = field(default_factory=list)
    log: str = ""


def why_unavailable() -> str | None:
    """Say why no server can run here; None if one can."""
    for module, name in (("sglang", "SGLang"), ("torch", "torch")):
        if importlib.util.find_spec(module) is None:
            return f"{name} is not installed for this Python"
    import torch

    return None if torch.cuda.is_available() else "there is no GPU here"


def read_vocabulary_size(model: Path) -> int:
    """Read ``vocab_size`` from the checkpoint's ``config.json``, at any depth.

    Raises:
        OSError: the file cannot be read.
        UserError: it is not JSON, has no ``vocab_size``, or one too small to draw prompts from.
    """
    size = _read_count(model, "vocab_size")
    if size is None:
        raise UserError(f"{model / 'config.json'} names no vocab_size")
    if size < 3:
        raise UserError(f"{model / 'config.json'}: vocab_size {size} leaves nothing to draw from")
    return size


def check_heads(model: Path, heads: int) -> None:
    """Check that the checkpoint has as many MTP heads, if its ``config.json`` says how many.

    Raises:
        OSError: the file cannot be read.
        UserError: it is not JSON, or names fewer.
    """
    there = _read_count(model, "num_nextn_predict_layers")
    if there is not None and there < heads:
        raise UserError(f"{model} has {there} MTP heads, not {heads}; set --heads")


def _read_count(model: Path, name: str) -> int | None:
    file = model / "config.json"
    try:
        pending: list[Any] = [json.loads(file.read_bytes())]
    except (ValueError, RecursionError):
        raise UserError(f"{file} is not JSON") from None
    while pending:
        node = pending.pop(0)
        if isinstance(node, dict):
            if type(count := node.get(name)) is int:
                return count
            pending += node.values()
    return None


def verify(
    model: Path,
    log: Path,
    progress: Callable[[str], None],
    *,
    vocabulary: int,
    heads: int = 2,
    lazy: bool = False,
    options: Sequence[str] = (),
    **server_options: Any,
) -> Result:
    """Start a server on ``model`` and compare its answers.

    A fault of the server is in the result, never raised.

    Args:
        model: the checkpoint's directory.
        log: the file that receives the server's output.
        progress: called with one sentence before each step.
        vocabulary: token ids of prompts are below it.
        heads: MTP heads to serve with, each a draft step; 0 for no speculation.
        lazy: give a request its second checkpoint slot near boundaries only.
        options: further options of the server.
        server_options: further arguments of ``Server``.
    """
    result = Result(log=str(log), heads=heads)
    given = [*BASE_OPTIONS, *(list_mtp_options(heads) if heads else ()), *options]
    if lazy:
        given.append(LAZY_OPTION)
    start = time.monotonic()
    try:
        progress("starting the server and capturing its graphs")
        with Server(model, given, log, **server_options) as running:
            result.start_seconds = round(time.monotonic() - start, 1)
            result.prefill_graph = find_prefill_graph(log)
            inputs = equality.draw_prompts(PROMPTS, LENGTHS, vocabulary)
            progress(f"decoding {PROMPTS} x {NEW_TOKENS} tokens, then a cold prefill of them")
            decoded, answers = equality.compare_decode_with_prefill(running, inputs, NEW_TOKENS)
            result.comparisons.append(decoded)
            result.accept_length = equality.compute_accept_length(answers)
            result.distinct_tokens = min(len(set(answer["output_ids"])) for answer in answers)

            progress("decoding again, for prefixes that decoding made")
            prefixes = equality.extend_by_decoding(running, inputs, NEW_TOKENS)
            suffixes = equality.draw_prompts(PROMPTS, [SUFFIX], vocabulary, seed=1)
            progress("a suffix on each of them, then the same on an empty cache")
            result.comparisons.append(
                equality.compare_hit_with_cold(
                    running, "suffix on a decode-made prefix", prefixes, suffixes, 32
                )
            )

            progress("prefilling prompts, then a suffix on each, then the same on an empty cache")
            prefixes = equality.draw_prompts(PROMPTS, PREFIX_LENGTHS, vocabulary, seed=2)
            running.flush()
            # One by one: together they are longer than the largest prefill graph.
            for prefix in prefixes:
                running.generate([prefix], 0)
            result.comparisons.append(
                equality.compare_hit_with_cold(
                    running, "suffix on a prefill-made prefix", prefixes, suffixes, 32
                )
            )
    except ServerError as error:
        result.error = str(error)
        return result
    finally:
        result.seconds = round(time.monotonic() - start, 1)
    hits = [cached for comparison in result.comparisons[1:] for cached in comparison.cached]
    if not all(hits):
        result.error = f"the prefix cache was not hit: {hits} tokens reused; log: {log}"
    elif heads and not result.accept_length:
        result.error = f"the server did not speculate; log: {log}"
    elif not all(comparison.exact for comparison in result.comparisons):
        result.error = f"logprobs differ; log: {log}"
    result.passed = result.error is None
    return result

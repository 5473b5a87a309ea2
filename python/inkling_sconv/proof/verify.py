"""One real server with MTP and CUDA graphs, and whether what it says is right to the bit."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inkling_sconv.proof import equality
from inkling_sconv.proof.server import BASE_OPTIONS, MTP_OPTIONS, Server, ServerError

PROMPTS = 6
# Around the checkpoint distance of 128: short of it, on it, past several of it.
LENGTHS = (100, 128, 333, 700, 1025, 1400)
NEW_TOKENS = 300
SUFFIX = 150


@dataclass
class Result:
    """What was seen; ``passed`` only if every step was reached and every comparison is exact."""

    passed: bool = False
    error: str | None = None
    accept_length: float = 0.0
    distinct_tokens: int = 0
    comparisons: list[equality.Comparison] = field(default_factory=list)
    log: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def why_unavailable() -> str | None:
    """What this machine lacks to run a server; None if nothing."""
    for module, name in (("sglang", "SGLang"), ("torch", "torch")):
        if importlib.util.find_spec(module) is None:
            return f"{name} is not installed for this Python"
    import torch

    return None if torch.cuda.is_available() else "there is no GPU here"


def read_vocabulary_size(model: Path) -> int:
    """The vocabulary size that the checkpoint's ``config.json`` names, at any depth.

    Raises:
        OSError: there is no such file.
        ValueError: it is not JSON, or names none, or one too small to draw prompts from.
    """
    file = model / "config.json"
    try:
        pending: list[Any] = [json.loads(file.read_bytes())]
    except (ValueError, RecursionError):
        raise ValueError(f"{file} is not JSON") from None
    while pending:
        node = pending.pop(0)
        if isinstance(node, dict):
            size = node.get("vocab_size")
            if type(size) is int:
                if size < 3:
                    raise ValueError(f"{file}: vocab_size {size} leaves nothing to draw from")
                return size
            pending += node.values()
    raise ValueError(f"{file} names no vocab_size")


def verify(
    model: Path,
    log: Path,
    progress: Callable[[str], None],
    *,
    vocabulary: int,
    options: Sequence[str] = (),
    **server: Any,
) -> Result:
    """Start a server on ``model`` and compare; says what it does through ``progress``.

    Never raises for what the server does: that is in the result. ``server`` goes to ``Server``.
    """
    result = Result(log=str(log))
    try:
        progress("starting the server and capturing its graphs")
        with Server(model, (*BASE_OPTIONS, *MTP_OPTIONS, *options), log, **server) as running:
            inputs = equality.draw_prompts(PROMPTS, LENGTHS, vocabulary)
            progress(f"decoding {PROMPTS} x {NEW_TOKENS} tokens, then a cold prefill of them")
            decoded, answers = equality.compare_decode_with_prefill(running, inputs, NEW_TOKENS)
            result.comparisons.append(decoded)
            result.accept_length = equality.compute_accept_length(answers)
            result.distinct_tokens = min(len(set(answer["output_ids"])) for answer in answers)

            progress("decoding again, for prefixes that decoding made")
            running.flush()
            again = running.generate(inputs, NEW_TOKENS)
            prefixes = [[*i, *a["output_ids"]] for i, a in zip(inputs, again, strict=True)]
            suffixes = equality.draw_prompts(PROMPTS, [SUFFIX], vocabulary, seed=1)
            progress("a suffix on each of them, then the same on an empty cache")
            result.comparisons.append(
                equality.compare_hit_with_cold(
                    running, "suffix on a decode-made prefix", prefixes, suffixes, 32
                )
            )
    except ServerError as error:
        result.error = str(error)
        return result
    hits = result.comparisons[-1].cached
    if not all(hits):
        result.error = f"the prefix cache was not hit: {hits} tokens reused; log: {log}"
    elif not result.accept_length:
        result.error = f"the server did not speculate; log: {log}"
    elif not all(comparison.exact for comparison in result.comparisons):
        result.error = f"logprobs differ; log: {log}"
    result.passed = result.error is None
    return result

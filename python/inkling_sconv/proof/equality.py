"""Whether a server's state reuse is exact: the same floats with and without it.

Logprobs are compared as the server sends them: JSON keeps every bit of a double. Nothing is
averaged.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from inkling_sconv.proof.server import Server

FIRST_STEP_TOKENS = 8
"""So that the first decode step is not the last, which may have found more than was asked for."""


@dataclass(frozen=True)
class Comparison:
    """``differing`` of ``compared`` floats differ, the finite ones by ``largest`` at most.

    ``cached`` are the prefix tokens that each request reused, ``detail`` what else there is to say.
    """

    name: str
    compared: int
    differing: int
    largest: float
    cached: tuple[int, ...] = ()
    detail: str = ""

    @property
    def exact(self) -> bool:
        """Something was compared, and nothing differs."""
        return self.compared > 0 and self.differing == 0


def compare(
    name: str,
    left: Sequence[Sequence[float]],
    right: Sequence[Sequence[float]],
    cached: Sequence[int] = (),
    detail: str = "",
) -> Comparison:
    """Compare two lists of float lists, float by float.

    A float without a partner differs, and so does a list without one, even an empty list. NaN
    differs from everything; zeros of either sign are equal.
    """
    compared = differing = 0
    differences = []
    for mine, theirs in zip_longest(left, right):
        if mine is None or theirs is None:
            unpaired = max(len(mine or theirs or ()), 1)
            compared, differing = compared + unpaired, differing + unpaired
            continue
        compared += max(len(mine), len(theirs))
        differing += abs(len(mine) - len(theirs))
        differences += [abs(a - b) for a, b in zip(mine, theirs, strict=False) if a != b]
    # max() over NaN depends on the order; and JSON has neither NaN nor infinity.
    finite = [difference for difference in differences if math.isfinite(difference)]
    if len(finite) < len(differences):
        note = f"{len(differences) - len(finite)} not finite"
        detail = f"{detail}; {note}" if detail else note
    return Comparison(
        name,
        compared,
        differing + len(differences),
        max(finite, default=0.0),
        tuple(cached),
        detail,
    )


def draw_prompts(
    count: int, lengths: Sequence[int], vocabulary: int, seed: int = 0
) -> list[list[int]]:
    """``count`` random prompts, their lengths taken from ``lengths`` in turn."""
    draw = random.Random(seed)
    return [
        [draw.randrange(1, vocabulary - 1) for _ in range(lengths[i % len(lengths)])]
        for i in range(count)
    ]


def compare_decode_with_prefill(
    server: Server, inputs: Sequence[Sequence[int]], new_tokens: int
) -> tuple[Comparison, list[dict[str, Any]]]:
    """Logprobs of generated tokens against a cold prefill of the same tokens; and the answers."""
    server.flush()
    answers = server.generate(inputs, new_tokens)
    whole = [[*ids, *answer["output_ids"]] for ids, answer in zip(inputs, answers, strict=True)]
    server.flush()
    cold = _cold(server, server.generate(whole, 0, scored_from=0))
    decoded = [_logprobs(answer, "output") for answer in answers]
    scored = [
        _logprobs(answer, "input")[-len(mine) :] for answer, mine in zip(cold, decoded, strict=True)
    ]
    return compare("decode against a cold prefill", decoded, scored), answers


def rescore_answers(
    server: Server, prompts: Sequence[Sequence[int]], answers: Sequence[dict[str, Any]]
) -> Comparison:
    """Logprobs of answers given earlier, under any load, against a cold prefill of each text.

    ``answers`` are those of ``Server.generate``, or of the same request with other company. A text
    that was answered several times is scored once, and every answer is compared with that.
    """
    cold: dict[tuple[int, ...], list[float]] = {}
    decoded, scored = [], []
    server.flush()
    for prompt, answer in zip(prompts, answers, strict=True):
        text = (*prompt, *answer["output_ids"])
        # The cache fills again, but a prompt that is scored from its first token reuses nothing.
        if text not in cold:
            (again,) = _cold(server, server.generate([text], 0, scored_from=0))
            cold[text] = _logprobs(again, "input")
        decoded.append(_logprobs(answer, "output"))
        scored.append(cold[text][-len(decoded[-1]) :])
    return compare(
        "answers under load against a cold prefill",
        decoded,
        scored,
        detail=f"{len(answers)} answers, {len(cold)} texts",
    )


def compare_hit_with_cold(
    server: Server,
    name: str,
    prefixes: Sequence[Sequence[int]],
    suffixes: Sequence[Sequence[int]],
    new_tokens: int,
) -> Comparison:
    """A suffix on a prefix that the cache holds, against the same request on an empty cache.

    The suffix is scored and ``new_tokens`` are generated; both are compared.
    """
    requests = [([*p, *s], len(p)) for p, s in zip(prefixes, suffixes, strict=True)]

    # One by one: logprob_start_len is one number a call, and bounds the prefix that is reused.
    def ask(ids: list[int], scored_from: int) -> dict[str, Any]:
        return server.generate([ids], new_tokens, scored_from=scored_from)[0]

    hits = [ask(*request) for request in requests]
    cold = []
    for request in requests:
        server.flush()
        cold += _cold(server, [ask(*request)])
    cached = [answer["meta_info"]["cached_tokens"] for answer in hits]
    same_tokens = sum(a["output_ids"] == b["output_ids"] for a, b in zip(hits, cold, strict=True))
    return compare(
        name,
        [_logprobs(a, "input") + _logprobs(a, "output") for a in hits],
        [_logprobs(a, "input") + _logprobs(a, "output") for a in cold],
        cached,
        f"{same_tokens} of {len(requests)} outputs the same",
    )


def compare_steps_after_hit(
    server: Server,
    prefixes: Sequence[Sequence[int]],
    suffixes: Sequence[Sequence[int]],
    new_tokens: int,
) -> Comparison:
    """Tokens per decode step on a prefix that the cache holds, against an empty cache.

    Where the outputs are the same, the draft alone decides how many tokens a step gives: this sees
    its conv state, which logprobs of the target cannot.
    """
    whole = [[*prefix, *suffix] for prefix, suffix in zip(prefixes, suffixes, strict=True)]
    hits = [server.stream(ids, new_tokens) for ids in whole]
    cold = []
    for ids in whole:
        server.flush()
        cold.append(server.stream(ids, new_tokens))
    same = sum(
        [*chain.from_iterable(a)] == [*chain.from_iterable(b)]
        for a, b in zip(hits, cold, strict=True)
    )
    steps = [[float(len(group)) for group in groups] for groups in (*hits, *cold)]
    half = len(hits)
    totals = f"{sum(map(len, steps[:half]))} steps after a hit, {sum(map(len, steps[half:]))} cold"
    return compare(
        "tokens per decode step",
        steps[:half],
        steps[half:],
        detail=f"{totals}; {same} of {half} outputs the same",
    )


def compare_first_step_after_hit(
    server: Server, inputs: Sequence[Sequence[int]]
) -> tuple[Comparison, float, float]:
    """Tokens of the first decode step on a prefix that the cache holds, against an empty cache.

    Also the means, after a hit and cold. With inputs one token longer than what is cached, the
    draft's windows in that step are those of its conv checkpoint.

    Raises:
        ServerError: an answer is none, or the tokens of two steps came as one.
    """

    def first(ids: Sequence[int]) -> float:
        prefill, *steps = server.stream(ids, FIRST_STEP_TOKENS)
        if len(prefill) != 1 or not steps:
            raise server.error(f"stream: {len(prefill)} tokens came of the prefill, not 1")
        return float(len(steps[0]))

    cached = [server.generate([ids], 1)[0]["meta_info"]["cached_tokens"] for ids in inputs]
    hits = [first(ids) for ids in inputs]
    cold = []
    for ids in inputs:
        server.flush()
        cold.append(first(ids))
    means = statistics.fmean(hits), statistics.fmean(cold)
    detail = "{:.2f} tokens after a hit, {:.2f} cold".format(*means)
    name = "tokens of the first decode step"
    return compare(name, [hits], [cold], cached, detail), *means


def compute_accept_length(answers: Sequence[dict[str, Any]]) -> float:
    """Tokens per verification step, the bonus token counted: SGLang's ``spec_accept_length``.

    0.0 where the server does not speculate.
    """
    steps = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    return float(tokens / steps) if steps else 0.0


def _cold(server: Server, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers, which reused nothing: else they would be compared with their like."""
    reused = [answer["meta_info"]["cached_tokens"] for answer in answers]
    if any(reused):
        raise server.error(f"the prefix cache was not emptied: {reused} tokens reused after it")
    return answers


def _logprobs(answer: dict[str, Any], side: str) -> list[float]:
    scored = [entry[0] for entry in answer["meta_info"][f"{side}_token_logprobs"]]
    # The first token of a prompt has no logprob. Any other None was a NaN: JSON has none.
    if side == "input" and scored[0] is None:
        del scored[0]
    return [math.nan if logprob is None else logprob for logprob in scored]

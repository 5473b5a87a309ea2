"""Compare a server's logprobs and decode steps with and without state reuse, float by float.

Logprobs are compared as the server sends them: its JSON keeps every bit of a double. Nothing is
averaged.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from inkling_sconv.proof.server import Server

FIRST_STEP_TOKENS = 8
"""Ask for 8 tokens: the surplus of the last step is cut off, so it must not be the first."""


@dataclass(frozen=True)
class Comparison:
    """``differing`` of ``compared`` floats differ.

    ``largest`` is the largest finite difference. ``cached`` counts the prefix tokens that each
    request reused. ``detail`` is free text.
    """

    name: str
    compared: int
    differing: int
    largest: float
    cached: tuple[int, ...] = ()
    detail: str = ""

    @property
    def exact(self) -> bool:
        """At least one float was compared, and all are equal."""
        return self.compared > 0 and self.differing == 0


def compare(
    name: str,
    left: Sequence[Sequence[float]],
    right: Sequence[Sequence[float]],
    cached: Sequence[int] = (),
    detail: str = "",
) -> Comparison:
    """Compare two lists of float lists, float by float.

    A float without a partner counts as different, and so does a list without one, even an empty
    list. NaN differs from everything. 0.0 equals -0.0.
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
    # max() over NaN depends on the order, and JSON has neither NaN nor infinity.
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
    """Draw ``count`` random prompts of token ids. Their lengths cycle through ``lengths``."""
    draw = random.Random(seed)
    return [
        [draw.randrange(1, vocabulary - 1) for _ in range(lengths[i % len(lengths)])]
        for i in range(count)
    ]


def extend_by_decoding(
    server: Server, inputs: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """Empty the cache and generate. Returns each input with its output: prefixes to hit."""
    server.flush()
    answers = server.generate(inputs, new_tokens)
    return [[*ids, *answer["output_ids"]] for ids, answer in zip(inputs, answers, strict=True)]


def compare_decode_with_prefill(
    server: Server, inputs: Sequence[Sequence[int]], new_tokens: int
) -> tuple[Comparison, list[dict[str, Any]]]:
    """Compare logprobs of generated tokens with those of a cold prefill of the same tokens.

    Returns the comparison, and the answers that were generated.
    """
    server.flush()
    answers = server.generate(inputs, new_tokens)
    whole = [[*ids, *answer["output_ids"]] for ids, answer in zip(inputs, answers, strict=True)]
    server.flush()
    cold = _check_cold(server, server.generate(whole, 0, scored_from=0))
    decoded = [_read_logprobs(answer, "output") for answer in answers]
    scored = [
        _read_logprobs(answer, "input")[-len(mine) :]
        for answer, mine in zip(cold, decoded, strict=True)
    ]
    return compare("decode against a cold prefill", decoded, scored), answers


def rescore_answers(
    server: Server, prompts: Sequence[Sequence[int]], answers: Sequence[dict[str, Any]]
) -> Comparison:
    """Compare logprobs of earlier answers with those of a cold prefill of each text.

    ``answers`` are answers to ``/generate`` with logprobs, given under any load. A text that was
    generated several times is prefilled once, and every answer is compared with that.
    """
    cold: dict[tuple[int, ...], list[float]] = {}
    decoded, scored = [], []
    server.flush()
    for prompt, answer in zip(prompts, answers, strict=True):
        text = (*prompt, *answer["output_ids"])
        # No flush in between: a prompt that is scored from its first token reuses no prefix.
        if text not in cold:
            (again,) = _check_cold(server, server.generate([text], 0, scored_from=0))
            cold[text] = _read_logprobs(again, "input")
        decoded.append(_read_logprobs(answer, "output"))
        scored.append(cold[text][-len(decoded[-1]) :])
    detail = f"{len(answers)} answers, {len(cold)} texts"
    return compare("answers under load against a cold prefill", decoded, scored, detail=detail)


def compare_hit_with_cold(
    server: Server,
    name: str,
    prefixes: Sequence[Sequence[int]],
    suffixes: Sequence[Sequence[int]],
    new_tokens: int,
) -> Comparison:
    """Compare requests that reuse a cached prefix with the same requests on an empty cache.

    ``prefixes`` are in the cache. Each suffix is scored, and ``new_tokens`` are generated after it;
    both logprobs are compared.
    """
    requests = [([*p, *s], len(p)) for p, s in zip(prefixes, suffixes, strict=True)]

    # One by one: a request has one logprob_start_len, which also bounds the prefix that is reused.
    def ask(ids: list[int], scored_from: int) -> dict[str, Any]:
        return server.generate([ids], new_tokens, scored_from=scored_from)[0]

    hits = [ask(*request) for request in requests]
    cold = []
    for request in requests:
        server.flush()
        cold += _check_cold(server, [ask(*request)])
    cached = [answer["meta_info"]["cached_tokens"] for answer in hits]
    same_tokens = sum(a["output_ids"] == b["output_ids"] for a, b in zip(hits, cold, strict=True))
    return compare(
        name,
        [_read_logprobs(a, "input") + _read_logprobs(a, "output") for a in hits],
        [_read_logprobs(a, "input") + _read_logprobs(a, "output") for a in cold],
        cached,
        f"{same_tokens} of {len(requests)} outputs the same",
    )


def compare_steps_after_hit(
    server: Server,
    prefixes: Sequence[Sequence[int]],
    suffixes: Sequence[Sequence[int]],
    new_tokens: int,
) -> Comparison:
    """Compare tokens per decode step after a prefix hit with those on an empty cache.

    The draft model alone decides how many tokens a step yields for a given output. So this shows a
    wrong conv state of the draft, which the target's logprobs cannot show.
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
    after_hit, after_cold = (
        [[float(len(group)) for group in groups] for groups in streams] for streams in (hits, cold)
    )
    steps = f"{sum(map(len, after_hit))} steps after a hit, {sum(map(len, after_cold))} cold"
    detail = f"{steps}; {same} of {len(whole)} outputs the same"
    return compare("tokens per decode step", after_hit, after_cold, detail=detail)


def compare_first_step_after_hit(
    server: Server, inputs: Sequence[Sequence[int]]
) -> tuple[Comparison, float, float]:
    """Compare tokens of the first decode step after a prefix hit with those on an empty cache.

    With inputs one token longer than the cached prefix, that step reads the draft's conv windows
    from their checkpoint.

    Returns the comparison, the mean after a hit, and the mean on an empty cache.

    Raises:
        ServerError: an answer is unusable, or the server sent two steps as one.
    """

    def count_first(ids: Sequence[int]) -> float:
        prefill, *steps = server.stream(ids, FIRST_STEP_TOKENS)
        if len(prefill) != 1 or not steps:
            raise server.make_error(f"stream: {len(prefill)} tokens came of the prefill, not 1")
        return float(len(steps[0]))

    cached = [server.generate([ids], 1)[0]["meta_info"]["cached_tokens"] for ids in inputs]
    hits = [count_first(ids) for ids in inputs]
    cold = []
    for ids in inputs:
        server.flush()
        cold.append(count_first(ids))
    means = statistics.fmean(hits), statistics.fmean(cold)
    detail = "{:.2f} tokens after a hit, {:.2f} cold".format(*means)
    return compare("tokens of the first decode step", [hits], [cold], cached, detail), *means


def compute_accept_length(answers: Sequence[dict[str, Any]]) -> float:
    """Tokens per verification step, bonus token included: SGLang's ``spec_accept_length``.

    0.0 if the server does not speculate.
    """
    steps = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    return float(tokens / steps) if steps else 0.0


def _check_cold(server: Server, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``answers``.

    Raises if any answer reused a cached prefix: the baseline must be cold.
    """
    reused = [answer["meta_info"]["cached_tokens"] for answer in answers]
    if any(reused):
        raise server.make_error(
            f"the prefix cache was not emptied: {reused} tokens reused after it"
        )
    return answers


def _read_logprobs(answer: dict[str, Any], side: str) -> list[float]:
    scored = [entry[0] for entry in answer["meta_info"][f"{side}_token_logprobs"]]
    # The first token of a prompt has no logprob. Any other None stands for NaN.
    if side == "input" and scored[0] is None:
        del scored[0]
    return [math.nan if logprob is None else logprob for logprob in scored]

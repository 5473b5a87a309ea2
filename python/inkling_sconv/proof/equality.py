"""Compare a server's logprobs and decode steps with and without state reuse, float by float.

Logprobs are compared as the server sends them: its JSON keeps every bit of a double. Nothing is
averaged.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, TypeVar

from inkling_sconv.proof.server import Server

Request = TypeVar("Request")
Reply = TypeVar("Reply")

BATCH = 8
"""Prompts in one request: as many as the server of ``BASE_OPTIONS`` runs at a time."""

FIRST_STEP_TOKENS = 24
"""Several steps, since the last one is cut off at the number of tokens asked for."""


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

    A float or list without a partner counts as different, even an empty list. NaN differs from
    everything. 0.0 equals -0.0.
    """
    compared, differences = 0, []
    for mine, theirs in zip_longest(left, right):
        if mine is None or theirs is None:
            mine, theirs = mine or theirs or [math.nan], []
        pairs = [*zip_longest(mine, theirs, fillvalue=math.nan)]
        compared += len(pairs)
        differences += [abs(a - b) for a, b in pairs if a != b]
    # max() over NaN depends on the order, and JSON has neither NaN nor infinity.
    finite = [difference for difference in differences if math.isfinite(difference)]
    if len(finite) < len(differences):
        note = f"{len(differences) - len(finite)} not finite"
        detail = f"{detail}; {note}" if detail else note
    largest = max(finite, default=0.0)
    return Comparison(name, compared, len(differences), largest, tuple(cached), detail)


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

    Returns:
        The comparison, and the answers that were generated.
    """
    server.flush()
    answers = server.generate(inputs, new_tokens)
    name = "decode against a cold prefill"
    return rescore_answers(server, inputs, answers, name), answers


def rescore_answers(
    server: Server,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[dict[str, Any]],
    name: str = "answers under load against a cold prefill",
) -> Comparison:
    """Compare logprobs of earlier answers with those of a cold prefill of each text.

    ``answers`` are answers to ``/generate`` with logprobs, given under any load. A text that was
    generated several times is prefilled once, and every answer is compared with that.
    """
    texts = [(*p, *answer["output_ids"]) for p, answer in zip(prompts, answers, strict=True)]
    unique = [*dict.fromkeys(texts)]
    cold: dict[tuple[int, ...], list[float]] = {}
    server.flush()
    # No flush in between: a prompt that is scored from its first token reuses no prefix.
    for start in range(0, len(unique), BATCH):
        batch = unique[start : start + BATCH]
        again = server.generate(batch, 0, scored_from=0)
        _check_cold(server, again)
        cold |= {text: read_logprobs(one, "input") for text, one in zip(batch, again, strict=True)}
    decoded = [read_logprobs(answer, "output") for answer in answers]
    scored = [cold[text][-len(mine) :] for text, mine in zip(texts, decoded, strict=True)]
    return compare(name, decoded, scored, detail=f"{len(answers)} answers, {len(cold)} texts")


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

    # One prompt a request, since its logprob_start_len also limits the prefix that is reused.
    def ask(request: tuple[list[int], int]) -> dict[str, Any]:
        ids, scored_from = request
        return server.generate([ids], new_tokens, scored_from=scored_from)[0]

    requests = [([*p, *s], len(p)) for p, s in zip(prefixes, suffixes, strict=True)]
    hits, cold = _ask_hit_and_cold(server, ask, requests)
    _check_cold(server, cold)
    left, right = (
        [read_logprobs(answer, "input") + read_logprobs(answer, "output") for answer in answers]
        for answers in (hits, cold)
    )
    cached = [answer["meta_info"]["cached_tokens"] for answer in hits]
    same = sum(a["output_ids"] == b["output_ids"] for a, b in zip(hits, cold, strict=True))
    return compare(name, left, right, cached, f"{same} of {len(requests)} outputs the same")


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
    hits, cold = _ask_hit_and_cold(server, lambda ids: server.stream(ids, new_tokens), whole)
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

    Returns:
        The comparison, the mean after a hit, and the mean on an empty cache.

    Raises:
        ServerError: an answer is unusable, or its first message has more than the prefill's token.
    """

    def count_first(ids: Sequence[int]) -> float:
        prefill, *steps = server.stream(ids, FIRST_STEP_TOKENS)
        if len(prefill) != 1:
            raise server.make_error(f"stream: {len(prefill)} tokens in the first message, not 1")
        return float(len(steps[0]))

    cached = [server.generate([ids], 1)[0]["meta_info"]["cached_tokens"] for ids in inputs]
    hits, cold = _ask_hit_and_cold(server, count_first, inputs)
    means = statistics.fmean(hits), statistics.fmean(cold)
    detail = "{:.2f} tokens after a hit, {:.2f} cold".format(*means)
    return compare("tokens of the first decode step", [hits], [cold], cached, detail), *means


def _ask_hit_and_cold(
    server: Server, ask: Callable[[Request], Reply], requests: Sequence[Request]
) -> tuple[list[Reply], list[Reply]]:
    """Ask each request with the cache as it is, and then again, each on an empty cache."""
    hits, cold = [ask(request) for request in requests], []
    for request in requests:
        server.flush()
        cold.append(ask(request))
    return hits, cold


def compute_accept_length(answers: Sequence[dict[str, Any]]) -> float:
    """Compute tokens per verification step, bonus token included: ``spec_accept_length``.

    It is 0.0 if the server does not speculate.
    """
    steps = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    return float(tokens / steps) if steps else 0.0


def _check_cold(server: Server, answers: Sequence[dict[str, Any]]) -> None:
    """Check that no answer reused a cached prefix: the baseline must be cold.

    Raises:
        ServerError: one did.
    """
    reused = [answer["meta_info"]["cached_tokens"] for answer in answers]
    if any(reused):
        what = f"the prefix cache was not emptied: {reused} tokens reused after it"
        raise server.make_error(what)


def read_logprobs(answer: dict[str, Any], side: str) -> list[float]:
    """Read the logprobs of ``side``, ``input`` or ``output``, from an answer to ``/generate``."""
    scored = [entry[0] for entry in answer["meta_info"][f"{side}_token_logprobs"]]
    # The first token of a prompt has no logprob. Any other None stands for NaN.
    if side == "input" and scored[0] is None:
        del scored[0]
    return [math.nan if logprob is None else logprob for logprob in scored]

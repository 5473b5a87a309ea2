"""Many requests of mixed shapes at once, and what must hold after them.

The plan of a load follows from its seed alone; which requests meet in a batch does not. Every check
returns complaints, one line each: an empty list is a pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import random
import re
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from inkling_sconv.proof.server import Server
from prometheus_client.parser import text_string_to_metric_families
from sglang.test.ci.ci_register import register_cuda_ci

# SGLang's run_suite.py refuses every file under test/registered that registers nothing.
register_cuda_ci(
    est_time=0, stage="base-b", runner_config="1-gpu-large", disabled="no tests: shared code"
)

PAGE = 128
CLIENTS = 32
ROUND = 500
# Every fifth round has a stream that its client leaves. It holds its slot for seconds: SGLang
# aborts it two seconds after the client went.
CLOSED_EVERY = 5
CLOSED_TOKENS = 1500
# Eight requests that come one after the other, are let in with what they hold then, and have no
# room for what they grow to: 8 x 4 pages.
WAVE, WAVE_TOKENS, WAVE_GAP = 8, 300, 0.005
TURNS = 3
SHARES = {
    "shared prefix": 0.20,
    "conversation": 0.12,
    "page crossed": 0.10,
    "long": 0.015,
    "repeated": 0.05,
    "aborted": 0.05,
    "aborted in the queue": 0.03,
}
SHAPES = ("fresh", *SHARES, "wave", "closed")
SCORED = 0.02
SETTLE_SECONDS = 45
SCHEDULER = "sglang::scheduler"
POOLS = {"full": "kv", "swa": "swa", "mamba": "mamba"}


class End(str, enum.Enum):
    """How a request ended, as its client saw it."""

    WHOLE = "whole"
    ABORTED = "aborted"
    CLOSED = "closed"
    FAILED = "failed"


@dataclass(frozen=True)
class Job:
    """What one client does at a stretch: a request, or the turns of a conversation.

    A turn appends its tokens to the text so far, and asks for a number of new ones.
    """

    shape: str
    turns: tuple[tuple[tuple[int, ...], int], ...]
    scored: bool = False
    streamed: bool = False
    delay: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a request. ``answer`` is kept if it has logprobs; ``error`` is one line."""

    shape: str
    ids: tuple[int, ...]
    new_tokens: int
    end: End
    tokens: tuple[int, ...] = ()
    cached: int = 0
    answer: dict[str, Any] | None = field(default=None, repr=False)
    error: str = ""


@dataclass(frozen=True)
class Pool:
    """Slots of one pool: tokens, or states of requests. ``used`` are those that neither is free."""

    available: int
    evictable: int
    used: int


@dataclass(frozen=True)
class Counters:
    """What the scheduler says of itself on ``/metrics``."""

    pools: dict[str, Pool]
    running: int
    queued: int

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, and no slot is held for anything."""
        busy = self.running + self.queued + sum(pool.used for pool in self.pools.values())
        return busy == 0


@dataclass
class Soak:
    """What a load left behind. Memory is in bytes, read after flushes."""

    outcomes: list[Outcome]
    start: Counters
    end: Counters
    idle: list[Counters]
    resident: list[int]
    gpu: list[int]
    flushes: int
    seconds: float


@dataclass(frozen=True)
class Killed:
    """What clients saw when the scheduler was killed; ``ended`` is None if the server stayed."""

    outcomes: list[Outcome]
    seconds: float
    ended: float | None

    @property
    def cut_off(self) -> list[Outcome]:
        """The requests that got no answer."""
        return [outcome for outcome in self.outcomes if outcome.end is End.FAILED]


# ------------------------------------------------------------------------------------- the plan


def plan(total: int, vocabulary: int, seed: int, size: int = ROUND) -> list[list[Job]]:
    """Rounds of about ``size`` requests, ``total`` in all; the wave of a round comes first."""
    draw = random.Random(seed)
    rounds = max(1, round(total / size))

    def text(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(1, vocabulary - 1) for _ in range(length))

    bases = [text(draw.randint(PAGE, 5 * PAGE)) for _ in range(12)]
    repeated = [(text(draw.randint(1, 400)), draw.randint(8, 24)) for _ in range(16)]
    wave = [text(PAGE - 28 - number) for number in range(WAVE)]
    ends = [total * number // rounds for number in range(rounds + 1)]
    return [
        _round(draw, text, bases, repeated, wave, ends[number + 1] - ends[number], number)
        for number in range(rounds)
    ]


def _round(
    draw: random.Random,
    text: Callable[[int], tuple[int, ...]],
    bases: list[tuple[int, ...]],
    repeated: list[tuple[tuple[int, ...], int]],
    wave: list[tuple[int, ...]],
    size: int,
    number: int,
) -> list[Job]:
    # The same texts in every round, so that each is rescored once.
    first = [
        Job("wave", ((ids, WAVE_TOKENS),), scored=place % 2 == 0, delay=place * WAVE_GAP)
        for place, ids in enumerate(wave)
    ]
    mixed = [Job("closed", ((text(100), CLOSED_TOKENS),), streamed=True)]
    if number % CLOSED_EVERY:
        mixed.clear()
    rest = size - len(first) - len(mixed)
    for shape, share in SHARES.items():
        turns = TURNS if shape == "conversation" else 1
        for _ in range(max(1, round(rest * share / turns))):
            mixed.append(_job(draw, text, bases, repeated, shape))
    while (left := size - len(first) - sum(len(job.turns) for job in mixed)) > 0:
        mixed.append(_job(draw, text, bases, repeated, "fresh"))
    if left < 0:
        raise ValueError(f"a round of {size} requests does not hold every shape")
    draw.shuffle(mixed)
    return [*first, *mixed]


def _job(
    draw: random.Random,
    text: Callable[[int], tuple[int, ...]],
    bases: list[tuple[int, ...]],
    repeated: list[tuple[tuple[int, ...], int]],
    shape: str,
) -> Job:
    new = draw.randint(4, 24)
    turns = [(text(draw.randint(1, 400)), new)]
    if shape == "shared prefix":
        turns = [((*draw.choice(bases), *text(draw.randint(1, 100))), new)]
    elif shape == "conversation":
        turns = [((*draw.choice(bases), *text(draw.randint(1, 60))), draw.randint(8, 40))]
        turns += [(text(draw.randint(1, 60)), draw.randint(8, 40)) for _ in range(TURNS - 1)]
    elif shape == "page crossed":
        turns = [(text(PAGE * draw.randint(1, 3) - draw.randint(1, 12)), draw.randint(16, 32))]
    elif shape == "long":
        turns = [(text(draw.randint(800, 2000)), new)]
    elif shape == "repeated":
        turns = [draw.choice(repeated)]
    aborted = shape.startswith("aborted")
    if aborted:
        turns = [(text(draw.randint(1, 300)), draw.randint(64, 96))]
    scored = not aborted and draw.random() < SCORED
    # With logprobs, a stream repeats all of them in every chunk.
    streamed = aborted or (not scored and draw.random() < 0.3)
    return Job(shape, tuple(turns), scored=scored, streamed=streamed)


# ---------------------------------------------------------------------------------- the clients


class _UnusableError(Exception):
    """An answer is none. The message is one line."""


class Clients:
    """Clients that take jobs from one list until it is empty. One stops at its first failure."""

    def __init__(self, server: Server, name: str):
        self.server = server
        # One width: SGLang aborts every request whose id begins with the one that is named.
        self.name = name
        self.asked = 0
        self.outcomes: list[Outcome] = []

    def run(self, jobs: Iterable[Job], clients: int = CLIENTS) -> list[Outcome]:
        """Do the jobs; the outcomes so far, in the order in which requests ended."""
        asyncio.run(self.work(jobs, clients))
        return self.outcomes

    async def work(self, jobs: Iterable[Job], clients: int = CLIENTS) -> None:
        """``run``, inside an event loop."""
        waiting = deque(jobs)
        timeout = aiohttp.ClientTimeout(total=self.server.request_seconds)
        # As in Server: a connection that is kept may be dropped as the next request is sent.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await asyncio.gather(*(self._client(session, waiting) for _ in range(clients)))

    async def _client(self, session: aiohttp.ClientSession, waiting: deque[Job]) -> None:
        while waiting:
            job = waiting.popleft()
            if job.delay:
                await asyncio.sleep(job.delay)
            ids: tuple[int, ...] = ()
            for suffix, new_tokens in job.turns:
                ids = (*ids, *suffix)
                outcome = await self._request(session, job, ids, new_tokens)
                self.outcomes.append(outcome)
                if outcome.end is End.FAILED:
                    return
                ids = (*ids, *outcome.tokens)

    async def _request(
        self, session: aiohttp.ClientSession, job: Job, ids: tuple[int, ...], new_tokens: int
    ) -> Outcome:
        rid = f"{self.name}-{self.asked:08d}"
        self.asked += 1
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": ids,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
            },
            "stream": job.streamed,
        }
        if job.scored:
            body |= {"return_logprob": True, "return_text_in_logprobs": False}
            body["logprob_start_len"] = -1
        try:
            end, answer = await self._ask(session, job, body)
            tokens = _tokens(answer, new_tokens, end, self.asks_for_abort(job))
        except _UnusableError as error:
            what = str(error)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            what = f"no answer ({type(error).__name__})"
        except (ValueError, KeyError, TypeError) as error:
            what = f"not an answer ({type(error).__name__}: {error})"
        else:
            return Outcome(
                job.shape,
                ids,
                new_tokens,
                _end(answer) if end is None else end,
                tokens,
                answer["meta_info"].get("cached_tokens", 0),
                answer if job.scored else None,
            )
        return Outcome(job.shape, ids, new_tokens, End.FAILED, error=f"{job.shape} {rid}: {what}")

    @staticmethod
    def asks_for_abort(job: Job) -> bool:
        """Whether a client of this job asks for an abort by the id."""
        return job.shape.startswith("aborted")

    async def _ask(
        self, session: aiohttp.ClientSession, job: Job, body: dict[str, Any]
    ) -> tuple[End | None, dict[str, Any]]:
        """The last that was sent of an answer; the end is None where the answer says it."""
        url = f"{self.server.url}/generate"
        abort = None
        if job.shape == "aborted in the queue":
            abort = asyncio.create_task(self._abort(session, body["rid"], after=0.005))
        try:
            async with session.post(url, json=body) as answer:
                if answer.status != 200:
                    said = (await answer.text())[:200]
                    raise _UnusableError(f"status {answer.status}: {said!r}")
                if not job.streamed:
                    return None, await answer.json(content_type=None)
                last, done = None, False
                async for line in answer.content:
                    done = done or line.startswith(b"data: [DONE]")
                    if not line.startswith(b"data: {"):
                        continue
                    first, last = last is None, json.loads(line[len(b"data: ") :])
                    if first and job.shape == "closed":
                        answer.close()
                        return End.CLOSED, last
                    if first and job.shape == "aborted":
                        await self._abort(session, body["rid"])
                if last is None or not done:
                    tokens = len((last or {}).get("output_ids") or [])
                    raise _UnusableError(f"no answer (the stream broke off after {tokens} tokens)")
                return None, last
        finally:
            if abort is not None:
                # What the request says is what counts; this only must not outlive it.
                await asyncio.gather(abort, return_exceptions=True)

    async def _abort(self, session: aiohttp.ClientSession, rid: str, after: float = 0) -> None:
        await asyncio.sleep(after)
        url = f"{self.server.url}/abort_request"
        async with session.post(url, json={"rid": rid}) as answer:
            if answer.status != 200:
                raise _UnusableError(f"/abort_request: status {answer.status}")


def _end(answer: dict[str, Any]) -> End:
    return End.ABORTED if answer["meta_info"]["finish_reason"]["type"] == "abort" else End.WHOLE


def _tokens(
    answer: dict[str, Any], new_tokens: int, end: End | None, may_be_aborted: bool
) -> tuple[int, ...]:
    """The tokens of an answer that ended as it should."""
    if "error" in answer:
        raise _UnusableError(f"error: {str(answer['error'])[:200]}")
    tokens = answer.get("output_ids") or []
    if not all(type(token) is int for token in tokens):
        raise _UnusableError(f"output_ids: {str(tokens)[:200]}")
    if end is None:
        reason = answer["meta_info"]["finish_reason"]
        if _end(answer) is End.ABORTED:
            if not may_be_aborted:
                raise _UnusableError(f"aborted, unasked: {str(reason)[:200]}")
        elif len(tokens) != new_tokens:
            raise _UnusableError(f"{len(tokens)} tokens of {new_tokens}: {str(reason)[:200]}")
    return tuple(tokens)


# ------------------------------------------------------------------------------------- the soak


def counters(server: Server) -> Counters:
    """The pools and the queue, as the server (with ``--enable-metrics``) last published them.

    Raises:
        ServerError: there is no answer, or a gauge is not in it.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            name = sample.name.removeprefix("sglang:")
            found[name] = found.get(name, 0) + sample.value

    def gauge(name: str) -> int:
        if name not in found:
            raise server.error(f"/metrics: no sglang:{name}")
        # Not sooner: gauges that are none of ours may be NaN.
        return int(found[name])

    return Counters(
        {
            pool: Pool(*(gauge(f"{prefix}_{kind}_tokens") for kind in Pool.__annotations__))
            for pool, prefix in POOLS.items()
        },
        gauge("num_running_reqs"),
        gauge("num_queue_reqs"),
    )


def settle(server: Server, vocabulary: int, seconds: float = SETTLE_SECONDS) -> Counters:
    """The counters once the server is idle, or after ``seconds`` the last ones."""
    # An idle server publishes at once where the last figure says that a request runs, and else
    # only every 30 s. A step of decoding says so; these are more steps than SGLang logs one of.
    server.generate([[vocabulary // 2]], 48)
    deadline = time.monotonic() + seconds
    while True:
        seen = counters(server)
        if seen.idle or time.monotonic() > deadline:
            return seen
        time.sleep(0.05)


def soak(
    server: Server,
    rounds: Sequence[Sequence[Job]],
    vocabulary: int,
    gpu: Callable[[], int] = lambda: 0,
    settle_seconds: float = SETTLE_SECONDS,
) -> Soak:
    """Put the rounds on the server. Between two it is idle; after every other one it is flushed.

    ``gpu`` gives the bytes in use on the device. A failure ends the load after its round.

    Raises:
        ServerError: the server is gone, or does not say how its pools are.
    """
    begin = time.monotonic()
    server.flush()
    start = settle(server, vocabulary, settle_seconds)
    clients = Clients(server, "soak")
    found = Soak(clients.outcomes, start, start, [], [], [], 0, 0.0)
    for number, jobs in enumerate(rounds):
        clients.run((job for job in jobs if job.shape == "wave"), WAVE)
        clients.run(job for job in jobs if job.shape != "wave")
        if any(outcome.end is End.FAILED for outcome in clients.outcomes):
            break
        # Before the flush, which makes new free lists and so hides what leaked.
        found.idle.append(settle(server, vocabulary, settle_seconds))
        if number % 2 or number == len(rounds) - 1:
            server.flush()
            found.flushes += 1
            found.resident.append(server.resident())
            found.gpu.append(gpu())
    with contextlib.suppress(IndexError):
        found.end = found.idle[-1]
    if not failed(clients.outcomes):
        found.end = settle(server, vocabulary, settle_seconds)
    found.seconds = time.monotonic() - begin
    return found


def kill(server: Server, jobs: Sequence[Job], after: int, bound: float) -> Killed:
    """Kill the scheduler with signal 9 once ``after`` requests have ended; see it through.

    Clients and then the server's processes get ``bound`` seconds each to end.

    Raises:
        ServerError: there is not one scheduler.
    """
    found = [pid for pid, title in server.processes().items() if title.startswith(SCHEDULER)]
    if len(found) != 1:
        raise server.error(f"{len(found)} processes are called {SCHEDULER}")
    clients = Clients(server, "kill")
    killed_at = None

    async def work() -> None:
        nonlocal killed_at
        load = asyncio.create_task(clients.work(jobs))
        while len(clients.outcomes) < after and not load.done():
            await asyncio.sleep(0.002)
        os.kill(found[0], signal.SIGKILL)
        killed_at = time.monotonic()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(load, bound)

    asyncio.run(work())
    assert killed_at is not None
    seconds = time.monotonic() - killed_at
    ended = None
    while ended is None and time.monotonic() < killed_at + seconds + bound:
        if not server.processes():
            ended = time.monotonic() - killed_at
        time.sleep(0.1)
    return Killed(clients.outcomes, seconds, ended)


# ----------------------------------------------------------------------------------- the checks


def failed(outcomes: Sequence[Outcome]) -> list[str]:
    """Requests that got no right answer."""
    return [outcome.error for outcome in outcomes if outcome.end is End.FAILED]


def missing(outcomes: Sequence[Outcome], total: int) -> list[str]:
    """What the load lacked: requests, shapes, aborts, prefix hits, answers with logprobs."""
    shapes = Counter(outcome.shape for outcome in outcomes)
    ends = Counter((outcome.shape, outcome.end) for outcome in outcomes)
    wants = {
        f"{total} requests": len(outcomes) == total,
        **{f"a request {shape!r}": shapes[shape] > 0 for shape in SHAPES},
        "an abort of a running request": ends["aborted", End.ABORTED] > 0,
        "an abort of a request that was just sent": ends["aborted in the queue", End.ABORTED] > 0,
        "a stream that its client left": ends["closed", End.CLOSED] > 0,
        "a wave that was answered": ends["wave", End.WHOLE] > 0,
        "a shared prefix that was reused": reused(outcomes, "shared prefix"),
        "a turn that reused an earlier one": reused(outcomes, "conversation"),
        "an answer with logprobs": len(scored(outcomes)) > 0,
    }
    return [f"the load had not {what}" for what, had in wants.items() if not had]


def reused(outcomes: Sequence[Outcome], shape: str) -> bool:
    """Whether a request of this shape found a prefix in the cache."""
    return any(outcome.cached > 0 for outcome in outcomes if outcome.shape == shape)


def scored(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The whole answers that have logprobs."""
    return [o for o in outcomes if o.answer is not None and o.end is End.WHOLE]


def repeated(outcomes: Sequence[Outcome]) -> dict[tuple[int, ...], list[Outcome]]:
    """Whole answers by prompt, of the prompts that were answered more than once."""
    by_prompt: dict[tuple[int, ...], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.end is End.WHOLE:
            by_prompt.setdefault(outcome.ids, []).append(outcome)
    return {ids: answers for ids, answers in by_prompt.items() if len(answers) > 1}


def disagreeing(outcomes: Sequence[Outcome]) -> list[str]:
    """Prompts that were answered with other tokens at another time; or none was asked twice."""
    again = repeated(outcomes)
    if not again:
        return ["no prompt was answered twice"]
    complaints = []
    for ids, answers in again.items():
        first = max((answer.tokens for answer in answers), key=len)
        others = sum(answer.tokens != first[: len(answer.tokens)] for answer in answers)
        if others:
            shape = answers[0].shape
            complaints.append(
                f"{shape}, {len(ids)} tokens: {others} of {len(answers)} answers differ"
            )
    return complaints


def leaked(found: Soak) -> list[str]:
    """Slots that an idle server does not have back, or that are not what they were at the start."""
    complaints = []
    for name, before in found.start.pools.items():
        total = before.available + before.evictable + before.used
        if total <= 0:
            complaints.append(f"{name}: a pool of {total} slots")
        for number, seen in enumerate([found.start, *found.idle, found.end]):
            pool = seen.pools[name]
            have = pool.available + pool.evictable
            if pool.used or have != total:
                complaints.append(f"{name}: {have} of {total} slots are back at stop {number}")
        if found.end.pools[name] != before:
            complaints.append(f"{name}: {before} at the start, {found.end.pools[name]} at the end")
    if not found.idle:
        complaints.append("the pools were never looked at")
    if not (found.start.idle and found.end.idle):
        complaints.append("the server was not idle at the start, or at the end")
    return complaints


def growth(samples: Sequence[int]) -> int:
    """Bytes that a server holds at the end beyond what it held after a tenth of the load."""
    return samples[-1] - samples[max(0, len(samples) // 10)]


def grown(name: str, samples: Sequence[int], bound: int) -> list[str]:
    """Memory that grew by more than ``bound`` bytes."""
    if len(samples) < 2 or min(samples) <= 0:
        return [f"{name}: not measured twice: {list(samples)}"]
    grew = growth(samples)
    over = f"{name}: grew by {grew / 2**20:.0f} MiB, {bound / 2**20:.0f} MiB are allowed"
    return [over] if grew > bound else []


def retracted(log: str) -> int:
    """Requests that the scheduler took out of a running batch because the pool was full."""
    return sum(map(int, re.findall(r"Retract requests.*?#retracted_reqs: (\d+)", log)))


def most(log: str, what: str) -> int:
    """The largest figure that the scheduler logged: of ``running`` or ``queue`` requests."""
    return max(map(int, re.findall(rf"#{what}-req: (\d+)", log)), default=0)


def untested(log: str, limit: int) -> list[str]:
    """What of a full server did not happen, by its own log: retraction, and a queue behind it."""
    running, queued = most(log, "running"), most(log, "queue")
    complaints = [] if retracted(log) else ["no request was retracted"]
    if running != limit:
        complaints.append(f"{running} requests ran at most, not {limit}")
    if not queued:
        complaints.append("no request waited in the queue")
    return complaints


def silent(found: Killed, asked: int, bound: float) -> list[str]:
    """What clients of a killed scheduler had to do without."""
    complaints = []
    if found.seconds >= bound:
        complaints.append(f"clients still wait after {bound:.0f} s")
    elif not found.cut_off:
        complaints.append("no request was cut off: nothing was tested")
    if len(found.outcomes) >= asked:
        complaints.append("the load was over before the scheduler was killed")
    complaints += [f"an error that says nothing: {o}" for o in found.cut_off if ": " not in o.error]
    return complaints

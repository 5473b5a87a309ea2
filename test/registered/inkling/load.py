"""A random load from a seed: many requests of mixed shapes at once, and what must hold after them.

The seed alone decides the requests. Which of them meet in a batch is chance. Every check returns
complaints, one line each: an empty list is a pass.
"""

import contextlib
import itertools
import os
import queue
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from inkling_sconv.proof.server import Server, ServerError, make_request
from prometheus_client.parser import text_string_to_metric_families
from sglang.test.ci.ci_register import register_cuda_ci

# SGLang's run_suite.py refuses every file under test/registered that registers nothing.
register_cuda_ci(
    est_time=0, stage="base-b", runner_config="1-gpu-large", disabled="no tests: shared code"
)

PAGE = 128
CLIENTS = 32
ROUND = 500
# Eight requests that come one after the other. The pool has room for each as it comes, and not for
# what they grow to: 8 x 4 pages.
WAVE, WAVE_TOKENS, WAVE_GAP = 8, 300, 0.005
# In every fifth round, a client leaves its stream. SGLang aborts the request two seconds later; it
# holds its slot until then.
CLOSED_EVERY, CLOSED_TOKENS = 5, 1500
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
"""Shares of the requests by shape. The rest of a round is "fresh"."""
SHAPES = ("fresh", *SHARES, "wave", "closed")
SCORED = 0.02
"""Share of the requests that ask for logprobs."""
SETTLE_SECONDS = 45
SCHEDULER = "sglang::scheduler"
POOLS = {"full": "kv", "swa": "swa", "mamba": "mamba"}

Tokens = tuple[int, ...]


END_OF = {"length": "whole", "stop": "whole", "abort": "aborted"}
"""How a request ended, by ``finish_reason`` of its answer."""
ENDS = ("whole", "aborted", "closed", "failed")
"""How a request may end, as its client sees it: "closed" is by the client, "failed" an error."""


@dataclass(frozen=True)
class Job:
    """What one client does at a time: a request, or the turns of a conversation.

    Each turn appends its tokens to the text so far, and asks for a number of new ones.
    """

    shape: str
    turns: tuple[tuple[Tokens, int], ...]
    scored: bool = False
    streamed: bool = False
    delay: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a request. ``answer`` is kept if it has logprobs; ``error`` is one line."""

    shape: str
    ids: Tokens
    new_tokens: int
    end: str
    tokens: Tokens = ()
    cached: int = 0
    answer: dict[str, Any] | None = field(default=None, repr=False)
    error: str = ""


@dataclass(frozen=True)
class Pool:
    """Slots of one pool: tokens, or states of requests. ``used`` ones hold a running request."""

    available: int
    evictable: int
    used: int


@dataclass(frozen=True)
class Counters:
    """What the scheduler publishes on ``/metrics``."""

    pools: dict[str, Pool]
    running: int
    queued: int

    @property
    def idle(self) -> bool:
        """No request runs or waits, and no slot is in use."""
        return not (self.running or self.queued or any(pool.used for pool in self.pools.values()))


@dataclass
class Soak:
    """What a load left behind. ``resident`` and ``gpu`` are bytes, read after flushes."""

    outcomes: list[Outcome]
    start: Counters
    end: Counters
    idle: list[Counters] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    gpu: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Killed:
    """What clients saw when the scheduler was killed; ``ended`` is None if the server stayed."""

    outcomes: list[Outcome]
    seconds: float
    ended: float | None

    @property
    def cut_off(self) -> list[Outcome]:
        """The requests that got no answer."""
        return [outcome for outcome in self.outcomes if outcome.end == "failed"]


class Planner:
    """Draws jobs. Texts that several requests share are drawn first."""

    def __init__(self, vocabulary: int, seed: int):
        self.draw, self.vocabulary = random.Random(seed), vocabulary
        self.bases = [self.draw_text(PAGE, 5 * PAGE) for _ in range(12)]
        self.repeated = [(self.draw_text(1, 400), self.draw.randint(8, 24)) for _ in range(16)]
        # Every round has the same wave, so that each of its texts is rescored once.
        self.wave = [self.draw_text(PAGE - 28 - n, PAGE - 28 - n) for n in range(WAVE)]

    def draw_text(self, shortest: int, longest: int) -> Tokens:
        length = self.draw.randint(shortest, longest)
        return tuple(self.draw.randrange(1, self.vocabulary - 1) for _ in range(length))

    def draw_turns(self, shape: str) -> list[tuple[Tokens, int]]:
        """The turns of a job: the text that each appends, and how many new tokens it asks for."""
        text, draw = self.draw_text, self.draw
        new = draw.randint(4, 24)
        if shape == "shared prefix":
            return [((*draw.choice(self.bases), *text(1, 100)), new)]
        if shape == "conversation":
            first = (*draw.choice(self.bases), *text(1, 60))
            rest = [text(1, 60) for _ in range(TURNS - 1)]
            return [(ids, draw.randint(8, 40)) for ids in (first, *rest)]
        if shape == "page crossed":
            length = PAGE * draw.randint(1, 3) - draw.randint(1, 12)
            return [(text(length, length), draw.randint(16, 32))]
        if shape == "repeated":
            return [draw.choice(self.repeated)]
        if shape.startswith("aborted"):
            return [(text(1, 300), draw.randint(64, 96))]
        return [(text(800, 2000) if shape == "long" else text(1, 400), new)]

    def draw_job(self, shape: str) -> Job:
        aborted = shape.startswith("aborted")
        scored = not aborted and self.draw.random() < SCORED
        # With logprobs, a stream repeats all of them in every chunk.
        streamed = aborted or (not scored and self.draw.random() < 0.3)
        return Job(shape, tuple(self.draw_turns(shape)), scored=scored, streamed=streamed)

    def draw_round(self, size: int, number: int) -> list[Job]:
        """``size`` requests: the wave first, then the others, shuffled."""
        wave = [
            Job("wave", ((ids, WAVE_TOKENS),), scored=place % 2 == 0, delay=place * WAVE_GAP)
            for place, ids in enumerate(self.wave)
        ]
        mixed = []
        if number % CLOSED_EVERY == 0:
            mixed.append(Job("closed", ((self.draw_text(100, 100), CLOSED_TOKENS),), streamed=True))
        rest = size - len(wave) - len(mixed)
        for shape, share in SHARES.items():
            count = round(rest * share / (TURNS if shape == "conversation" else 1))
            mixed += [self.draw_job(shape) for _ in range(max(1, count))]
        left = size - len(wave) - sum(len(job.turns) for job in mixed)
        if left < 1:
            raise ValueError(f"a round of {size} requests does not hold every shape")
        mixed += [self.draw_job("fresh") for _ in range(left)]
        self.draw.shuffle(mixed)
        return [*wave, *mixed]


def plan_rounds(total: int, vocabulary: int, seed: int, size: int = ROUND) -> list[list[Job]]:
    """Rounds of about ``size`` requests, ``total`` in all."""
    planner = Planner(vocabulary, seed)
    rounds = max(1, round(total / size))
    ends = [total * number // rounds for number in range(rounds + 1)]
    return [planner.draw_round(ends[n + 1] - ends[n], n) for n in range(rounds)]


class Clients:
    """Clients that take jobs from one list until it is empty. Each stops at its first failure."""

    def __init__(self, server: Server, name: str):
        self.server, self.name = server, name
        self.numbers = itertools.count()
        self.outcomes: list[Outcome] = []

    def run(self, jobs: Iterable[Job], clients: int = CLIENTS) -> list[Outcome]:
        """Do the jobs. Returns the outcomes so far, in the order in which requests ended."""
        for thread in self.start(jobs, clients):
            thread.join()
        return self.outcomes

    def start(self, jobs: Iterable[Job], clients: int = CLIENTS) -> list[threading.Thread]:
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        threads = [
            threading.Thread(target=self._take_jobs, args=(waiting,), daemon=True)
            for _ in range(clients)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _take_jobs(self, waiting: queue.SimpleQueue[Job]) -> None:
        with contextlib.suppress(queue.Empty):
            while self._do_job(waiting.get_nowait()):
                pass

    def _do_job(self, job: Job) -> bool:
        """Make the requests of a job. False if one failed."""
        time.sleep(job.delay)
        ids: Tokens = ()
        for suffix, new_tokens in job.turns:
            ids = (*ids, *suffix)
            # Of one width: SGLang aborts every request whose id begins with the given one.
            rid = f"{self.name}-{next(self.numbers):08d}"
            try:
                outcome = self._request(job, ids, new_tokens, rid)
            except ServerError as error:
                line = f"{job.shape} {rid}: {error}"
                outcome = Outcome(job.shape, ids, new_tokens, "failed", error=line)
            self.outcomes.append(outcome)
            if outcome.end == "failed":
                return False
            ids = (*ids, *outcome.tokens)
        return True

    def _request(self, job: Job, ids: Tokens, new_tokens: int, rid: str) -> Outcome:
        body = make_request(ids, new_tokens, rid=rid)
        if job.scored:
            body |= {"return_logprob": True, "return_text_in_logprobs": False}
            body["logprob_start_len"] = -1
        answer = self._ask(job, body) if job.streamed else self.server.post("/generate", body)
        try:
            tokens, meta = answer.get("output_ids") or [], answer["meta_info"]
            if not all(type(token) is int for token in tokens):
                raise TypeError("output_ids")
            end = END_OF[meta["finish_reason"]["type"]] if job.shape != "closed" else "closed"
            cached = meta.get("cached_tokens", 0)
        except (LookupError, TypeError, AttributeError) as error:
            what = f"not an answer ({error!r}): {str(answer)[:200]}"
            raise self.server.make_error(what) from None
        if end == "aborted" and not job.shape.startswith("aborted"):
            raise self.server.make_error(f"aborted, unasked: {meta['finish_reason']}")
        if end == "whole" and len(tokens) != new_tokens:
            raise self.server.make_error(f"{len(tokens)} tokens of {new_tokens}")
        kept = answer if job.scored else None
        return Outcome(job.shape, ids, new_tokens, end, tuple(tokens), cached, kept)

    def _ask(self, job: Job, body: dict[str, Any]) -> Any:
        """The last message of a stream, which the client may leave or have aborted."""
        if job.shape == "aborted in the queue":
            threading.Timer(0.005, self._abort, [body["rid"]]).start()
        last = None
        with contextlib.closing(self.server.read_stream(body)) as messages:
            for number, last in enumerate(messages):
                if job.shape == "closed":
                    return last
                if number == 0 and job.shape == "aborted":
                    self._abort(body["rid"])
        if last is None:
            raise self.server.make_error("no answer (an empty stream)")
        return last

    def _abort(self, rid: str) -> None:
        # What the request's own answer says is what counts.
        with contextlib.suppress(ServerError):
            self.server.post("/abort_request", {"rid": rid})


def read_counters(server: Server) -> Counters:
    """The pools and the queue, as a server with ``--enable-metrics`` last published them.

    Raises:
        ServerError: no answer, or a gauge is missing.
    """
    gauges: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            name = sample.name.removeprefix("sglang:")
            gauges[name] = gauges.get(name, 0) + sample.value
    kinds = [kind.name for kind in fields(Pool)]
    try:
        # Only these become integers, since other gauges may be NaN.
        pools = {
            pool: Pool(*(int(gauges[f"{prefix}_{kind}_tokens"]) for kind in kinds))
            for pool, prefix in POOLS.items()
        }
        return Counters(pools, int(gauges["num_running_reqs"]), int(gauges["num_queue_reqs"]))
    except KeyError as error:
        raise server.make_error(f"/metrics: no sglang:{error.args[0]}") from None


def settle(server: Server, vocabulary: int, seconds: float = SETTLE_SECONDS) -> Counters:
    """Wait until the server is idle, at most ``seconds``. Returns the last counters."""
    # An idle server publishes at once if its last figure shows a running request, else only every
    # 30 s. A decode step shows one. SGLang logs one step of several; 48 tokens are enough steps.
    server.generate([[vocabulary // 2]], 48)
    deadline = time.monotonic() + seconds
    while not (counters := read_counters(server)).idle and time.monotonic() < deadline:
        time.sleep(0.05)
    return counters


def soak(
    server: Server,
    rounds: Sequence[Sequence[Job]],
    vocabulary: int,
    measure_gpu: Callable[[], int] = lambda: 0,
    settle_seconds: float = SETTLE_SECONDS,
) -> Soak:
    """Put the rounds on the server. It is idle between two, and flushed after every other one.

    ``measure_gpu`` gives the bytes in use on the device. A failure ends the load after its round.

    Raises:
        ServerError: the server is gone, or publishes no counters.
    """
    begin = time.monotonic()
    server.flush()
    start = settle(server, vocabulary, settle_seconds)
    clients = Clients(server, "soak")
    found = Soak(clients.outcomes, start, start)
    for number, jobs in enumerate(rounds):
        clients.run((job for job in jobs if job.shape == "wave"), WAVE)
        clients.run(job for job in jobs if job.shape != "wave")
        if list_failures(clients.outcomes):
            break
        # Before the flush, which makes new free lists and so hides a leak.
        found.end = settle(server, vocabulary, settle_seconds)
        found.idle.append(found.end)
        if number % 2 or number == len(rounds) - 1:
            server.flush()
            found.resident.append(server.measure_memory())
            found.gpu.append(measure_gpu())
    else:
        found.end = settle(server, vocabulary, settle_seconds)
    found.seconds = time.monotonic() - begin
    return found


def kill(server: Server, jobs: Sequence[Job], after: int, bound: float) -> Killed:
    """Kill the scheduler with signal 9 once ``after`` requests have ended, and watch the end.

    Clients, and then the server's processes, get ``bound`` seconds each to end.

    Raises:
        ServerError: there is not one scheduler.
    """
    found = [n for n, title in server.list_processes().items() if title.startswith(SCHEDULER)]
    if len(found) != 1:
        raise server.make_error(f"{len(found)} processes are called {SCHEDULER}")
    clients = Clients(server, "kill")
    threads = clients.start(jobs)
    while len(clients.outcomes) < after and any(thread.is_alive() for thread in threads):
        time.sleep(0.002)
    os.kill(found[0], signal.SIGKILL)
    killed_at = time.monotonic()
    for thread in threads:
        thread.join(max(0.0, killed_at + bound - time.monotonic()))
    outcomes, seconds = [*clients.outcomes], time.monotonic() - killed_at
    deadline = killed_at + seconds + bound
    while server.list_processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    ended = None if server.list_processes() else time.monotonic() - killed_at
    return Killed(outcomes, seconds, ended)


def list_failures(outcomes: Sequence[Outcome]) -> list[str]:
    """Requests that got no right answer."""
    return [outcome.error for outcome in outcomes if outcome.end == "failed"]


def find_missing(outcomes: Sequence[Outcome], total: int) -> list[str]:
    """What the load lacked: requests, shapes, aborts, prefix hits, answers with logprobs."""
    seen = Counter(key for o in outcomes for key in (o.shape, (o.shape, o.end)))
    seen.update((o.shape, "with a prefix hit") for o in outcomes if o.cached)
    hits = ((shape, "with a prefix hit") for shape in ("shared prefix", "conversation"))
    aborts = ((shape, "aborted") for shape in ("aborted", "aborted in the queue"))
    wanted = (*SHAPES, *aborts, ("closed", "closed"), ("wave", "whole"), *hits)
    complaints = [f"the load had no request {key}" for key in wanted if not seen[key]]
    if len(outcomes) != total:
        complaints.append(f"the load had {len(outcomes)} requests, not {total}")
    return complaints + ([] if select_scored(outcomes) else ["the load had no logprobs"])


def select_scored(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The whole answers that have logprobs."""
    return [o for o in outcomes if o.answer is not None and o.end == "whole"]


def group_repeated(outcomes: Sequence[Outcome]) -> dict[Tokens, list[Outcome]]:
    """Whole answers by prompt, of the prompts that were answered more than once."""
    by_prompt: dict[Tokens, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.end == "whole":
            by_prompt.setdefault(outcome.ids, []).append(outcome)
    return {ids: answers for ids, answers in by_prompt.items() if len(answers) > 1}


def find_disagreements(outcomes: Sequence[Outcome]) -> list[str]:
    """Prompts that were answered with other tokens at another time."""
    again = group_repeated(outcomes)
    complaints = [] if again else ["no prompt was answered twice"]
    for ids, answers in again.items():
        longest = max((answer.tokens for answer in answers), key=len)
        if others := sum(answer.tokens != longest[: len(answer.tokens)] for answer in answers):
            what = f"{answers[0].shape}, {len(ids)} tokens"
            complaints.append(f"{what}: {others} of {len(answers)} answers differ")
    return complaints


def find_leaks(found: Soak) -> list[str]:
    """Slots that an idle server does not have back, or pools that are not as at the start."""
    complaints = [] if found.idle else ["the pools were never looked at"]
    for name, before in found.start.pools.items():
        total = before.available + before.evictable + before.used
        if total <= 0:
            complaints.append(f"{name}: a pool of {total} slots")
        for number, counters in enumerate([found.start, *found.idle, found.end]):
            pool = counters.pools[name]
            back = pool.available + pool.evictable
            if pool.used or back != total:
                complaints.append(f"{name}: {back} of {total} slots are back at stop {number}")
        if found.end.pools[name] != before:
            complaints.append(f"{name}: {before} at the start, {found.end.pools[name]} at the end")
    if not (found.start.idle and found.end.idle):
        complaints.append("the server was not idle at the start, or at the end")
    return complaints


def check_growth(name: str, samples: Sequence[int], bound: int) -> list[str]:
    """Memory that grew by more than ``bound`` bytes, from a tenth of the load to its end."""
    if len(samples) < 2 or min(samples) <= 0:
        return [f"{name}: not measured twice: {list(samples)}"]
    grew = samples[-1] - samples[len(samples) // 10]
    what = f"{name}: grew by {grew / 2**20:.0f} MiB, {bound / 2**20:.0f} MiB are allowed"
    return [what] if grew > bound else []


def count_retracted(log: str) -> int:
    """Requests that the scheduler took out of a running batch because the pool was full."""
    return sum(map(int, re.findall(r"Retract requests.*?#retracted_reqs: (\d+)", log)))


def find_most(log: str, what: str) -> int:
    """The largest number of ``running`` or ``queue`` requests that the scheduler logged."""
    return max(map(int, re.findall(rf"#{what}-req: (\d+)", log)), default=0)


def find_untested(log: str, limit: int) -> list[str]:
    """What its log does not show of a full server: retraction, ``limit`` requests, a queue."""
    running = find_most(log, "running")
    complaints = [] if count_retracted(log) else ["no request was retracted"]
    complaints += [] if running == limit else [f"{running} requests ran at most, not {limit}"]
    return complaints + ([] if find_most(log, "queue") else ["no request waited in the queue"])


def check_killed(found: Killed, asked: int, bound: float) -> list[str]:
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

"""A stand-in for ``sglang.launch_server`` without SGLang: greedy tokens are hashes of the text.

It takes the same options, answers ``/health``, ``/flush_cache``, ``/abort_request``,
``/start_profile`` and ``/generate``, and has a prefix cache of whole pages. With
``--enable-metrics`` it is a server under load: eight requests run at most, a child is its
scheduler, its log tells of queue and retraction, and ``/metrics`` of its pools. ``FAKE_SERVER``
names what it does wrong; unset, it does nothing wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fake_trace

VOCABULARY = 500
PAGE = 128
TOKENS_PER_STEP = 2
MODE = os.environ.get("FAKE_SERVER", "healthy")
if MODE == "accepts-less":
    TOKENS_PER_STEP = 1
FOREVER = 3600
RUNNING = 8
WAVE_TOKENS = 300
# A pool of tokens, one of the window's, and one of conv states.
POOLS = {"kv": 100_000 * PAGE, "swa": 100_000 * PAGE, "mamba": 100_000}


def _change(path: str, value: Any):
    """Puts ``value`` at ``path`` of the last answer."""

    def change(answers: list[Any]) -> Any:
        *parents, last = path.split("/")
        node = answers[-1]
        for name in parents:
            node = node[int(name) if isinstance(node, list) else name]
        if isinstance(node, list):
            node[int(last)] = value
        elif value is ...:
            del node[last]
        else:
            node[last] = value
        return answers

    return change


# What replaces the answers; text is sent as it is.
RUBBISH = {
    "not-json": lambda answers: "<html>busy</html>",
    "broken-json": lambda answers: json.dumps(answers)[:-9],
    "deep-json": lambda answers: "[" * 100_000,
    "long-integer": lambda answers: "[" + "1" * 5000 + "]",
    "not-utf-8": lambda answers: b'[{"text": "\xff"}]',
    "nothing": lambda answers: "",
    "null": lambda answers: None,
    "an-object": lambda answers: {"meta_info": {}},
    "an-error": lambda answers: {"error": {"message": "out of pages"}},
    "too-few": lambda answers: answers[:-1],
    "too-many": lambda answers: [*answers, *answers],
    "strings": lambda answers: ["a" for _ in answers],
    "no-meta": _change("meta_info", ...),
    "meta-is-a-list": _change("meta_info", []),
    "no-output-ids": _change("output_ids", ...),
    "null-output-ids": _change("output_ids", None),
    "no-tokens": _change("output_ids", []),
    "text-tokens": _change("output_ids/0", "the"),
    "list-tokens": _change("output_ids/0", [1]),
    "no-logprobs": _change("meta_info/output_token_logprobs", ...),
    "null-logprobs": _change("meta_info/output_token_logprobs", None),
    "empty-logprobs": _change("meta_info/output_token_logprobs", []),
    "flat-logprobs": _change("meta_info/output_token_logprobs/0", -1.0),
    "empty-entry": _change("meta_info/output_token_logprobs/0", []),
    "text-logprob": _change("meta_info/output_token_logprobs/0/0", "-1.0"),
    "true-logprob": _change("meta_info/output_token_logprobs/0/0", True),
    "huge-logprob": _change("meta_info/output_token_logprobs/0/0", 10**400),
    "no-cached-tokens": _change("meta_info/cached_tokens", ...),
    "text-cached-tokens": _change("meta_info/cached_tokens", "128"),
    "no-completion-tokens": _change("meta_info/completion_tokens", ...),
    "text-steps": _change("meta_info/spec_verify_ct", "7"),
}
RUBBISH_SCORES = {
    "no-input-logprobs": _change("meta_info/input_token_logprobs", ...),
    "null-input-logprobs": _change("meta_info/input_token_logprobs", None),
    "empty-input-logprobs": _change("meta_info/input_token_logprobs", []),
}
# As orjson, SGLang's own writer, sends what is no number; and as Python's does.
NO_NUMBER = {"null-logprob": None, "nan-logprob": math.nan, "infinite-logprob": -math.inf}


def _mixed(state: int) -> int:
    state = (state ^ (state >> 31)) * 0x9E3779B97F4A7C15 % 2**64
    return state ^ (state >> 29)


def states(tokens: Sequence[int]) -> Iterator[int]:
    """A number for every beginning of ``tokens``, the empty one first."""
    state = 1
    yield state
    for token in tokens:
        state = _mixed(state + token + 1)
        yield state


def logprobs(tokens: Sequence[int]) -> list[float]:
    """What the model gives each token after those in front of it."""
    return [-10 * _mixed(state + 7) / 2**64 for state in [*states(tokens)][1:]]


def continued(tokens: Sequence[int], count: int) -> list[int]:
    """``tokens`` and the ``count`` most probable ones after them."""
    (*_, state), whole = states(tokens), list(tokens)
    for _ in range(count):
        whole.append(_mixed(state + 3) % VOCABULARY)
        state = _mixed(state + whole[-1] + 1)
    return whole


class Busy:
    """What a server under load counts and says."""

    def __init__(self) -> None:
        self.on = self.dead = False
        self.slots = threading.Semaphore(10**6 if MODE == "never-queues" else RUNNING)
        self.lock = threading.Lock()
        self.running = self.waiting = self.leaked = self.ended = 0
        self.aborted: set[str] = set()
        self.ballast: list[bytes] = []

    def __enter__(self) -> None:
        with self.lock:
            self.waiting += 1
        self.slots.acquire()
        self.hang_if_dead()
        with self.lock:
            self.waiting -= 1
            self.running += 1
            if self.on:
                queued = 0 if MODE == "never-queues" else self.waiting
                print(f"Prefill, #running-req: {min(self.running, RUNNING)}, #queue-req: {queued}")

    def hang_if_dead(self) -> None:
        """Without a scheduler nobody answers, and here nobody says so."""
        if self.dead:
            time.sleep(FOREVER)

    def __exit__(self, *_: object) -> None:
        self.hang_if_dead()
        with self.lock:
            self.running -= 1
            self.ended += 1
            if MODE == "grows":
                # Not zeros, which take no memory before they are written.
                self.ballast.append(b"x" * 2**20)
        self.slots.release()

    def started(self, count: int) -> None:
        """A request of ``count`` new tokens runs."""
        if self.on and count == WAVE_TOKENS and MODE != "never-retracts":
            print("KV cache pool is full. Retract requests. #retracted_reqs: 1, #more: 0")

    def step(self) -> None:
        """A decode step takes its time, or an abort would always be late."""
        if self.on:
            time.sleep(0.001)

    def gone(self, rid: str) -> bool:
        """Whether a request was aborted. As SGLang's: by the beginning of its id."""
        return MODE != "ignores-aborts" and rid.startswith(tuple(self.aborted))

    def metrics(self, cached: int) -> str:
        lines = ["sglang:fwd_occupancy NaN"]
        for pool, total in POOLS.items():
            size = PAGE if pool != "mamba" else 1
            used = size * self.running + (self.leaked if pool == "mamba" else 0)
            evictable = size * cached
            if MODE == "leaks-unseen" and pool == "mamba":
                used, total = 0, total - self.leaked
            figures = {"used": used, "evictable": evictable, "available": total - used - evictable}
            for kind, value in figures.items():
                lines.append(f'sglang:{pool}_{kind}_tokens{{tp_rank="0"}} {value}.0')
        queued = 0 if MODE == "never-queues" else self.waiting
        lines += [f"sglang:num_running_reqs {self.running}.0", f"sglang:num_queue_reqs {queued}.0"]
        return "\n".join(lines) + "\n"


class Model:
    def __init__(self) -> None:
        self.cache: set[int] = set()
        self.calls = 0
        self.profile: dict[str, Any] | None = None

    def cached(self) -> int:
        """Pages in the cache. The beginning of everything is in it, and is none."""
        return max(0, len(self.cache) - 1)

    def flush(self) -> None:
        if MODE != "never-flushes":
            self.cache.clear()

    def answer(self, tokens: list[int], count: int, scored_from: int) -> dict[str, Any]:
        whole = continued(tokens, count)
        numbers, scores = [*states(whole)], logprobs(whole)
        limit = len(tokens) - 1 if scored_from < 0 else min(scored_from, len(tokens) - 1)
        pages = range(PAGE, limit + 1, PAGE)
        cached = max((n for n in pages if numbers[n] in self.cache), default=0)
        self.cache.update(numbers[::PAGE])
        if MODE == "never-hits":
            cached = 0
        if MODE == "stale" and cached:
            scores[len(tokens) :] = [score * 1.5 for score in scores[len(tokens) :]]
        entries = [[score, token, None] for score, token in zip(scores, whole, strict=True)]
        meta = {
            "cached_tokens": cached,
            "completion_tokens": count,
            "finish_reason": {"type": "length", "length": count},
            "output_token_logprobs": entries[len(tokens) :],
            "spec_verify_ct": -(-count // TOKENS_PER_STEP),
        }
        if scored_from >= 0:
            scored = entries[scored_from : len(tokens)]
            scored[0] = [None, *scored[0][1:]]
            meta["input_token_logprobs"] = scored
        meta["spec_accept_histogram"] = [count % TOKENS_PER_STEP, count // TOKENS_PER_STEP]
        if MODE == "other-logprob" and count > 200:
            entry = meta["output_token_logprobs"][7]
            entry[0] = math.nextafter(entry[0], 0)
        if MODE == "corrupts" and scored_from < 0 and count:
            score = meta["output_token_logprobs"][0]
            score[0] = math.nextafter(score[0], 0)
        if MODE == "drifts" and BUSY.ended > 100 and count:
            whole[-1] = (whole[-1] + 1) % VOCABULARY
        if MODE == "does-not-speculate":
            del meta["spec_verify_ct"]
        return {"output_ids": whole[len(tokens) :], "meta_info": meta}

    def generate(self, body: dict[str, Any]) -> Any:
        self.calls += 1
        count = body["sampling_params"]["max_new_tokens"]
        scored_from = body.get("logprob_start_len", -1)
        if isinstance(body["input_ids"][0], int):
            return self.answer(body["input_ids"], count, scored_from)
        if self.profile:
            self.write_trace(len(body["input_ids"]))
        answers = [self.answer(ids, count, scored_from) for ids in body["input_ids"]]
        if MODE == "one-ulp" and scored_from == 0:
            entry = answers[-1]["meta_info"]["input_token_logprobs"][-1]
            entry[0] = math.nextafter(entry[0], 0)
        if MODE in NO_NUMBER and count:
            answers[0]["meta_info"]["output_token_logprobs"][5][0] = NO_NUMBER[MODE]
        if MODE in RUBBISH_SCORES and scored_from >= 0:
            return RUBBISH_SCORES[MODE](answers)
        return RUBBISH[MODE](answers) if MODE in RUBBISH and count else answers

    def write_trace(self, batch: int) -> None:
        """As SGLang does it with ``profile_by_stage``, in the middle of a generation."""
        request, self.profile = self.profile, None
        folder = Path(request["output_dir"])
        fake_trace.write(folder / "1-TP-0-EXTEND.trace.json.gz", [])
        if MODE == "writes-no-trace":
            return
        draft = fake_trace.DRAFT[MODE == "tracks-nothing" :]
        events = fake_trace.trace(request["num_steps"], batch=batch, draft=(draft,))
        trace = folder / "1-TP-0-DECODE.trace.json.gz"
        fake_trace.write(trace, events)
        if MODE == "cuts-the-trace":
            trace.write_bytes(trace.read_bytes()[:-100])


BUSY = Busy()


class Handler(BaseHTTPRequestHandler):
    model = Model()

    def log_message(self, *_: object) -> None:
        pass

    def send(self, status: int, content: Any) -> None:
        if not isinstance(content, bytes):
            content = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if MODE == "silent-health":
            time.sleep(FOREVER)
        if self.path == "/metrics":
            return self.send(200, BUSY.metrics(self.model.cached()) if BUSY.on else "")
        self.send(503 if MODE == "unhealthy" else 200, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        if self.path == "/start_profile":
            self.model.profile = body
            return self.send(200, "Start profiling.\n")
        if self.path.startswith("/flush_cache"):
            self.model.flush()
            return self.send(400 if MODE == "refuses-to-flush" else 200, "Cache flushed.\n")
        if self.path == "/abort_request":
            BUSY.aborted.add(body["rid"])
            return self.send(200, "")
        if not body.get("stream"):
            print("generating", flush=True)
        if MODE == "dies" and self.model.calls:
            die("CUDA error: an illegal memory access was encountered")
        if MODE == "orphan":
            os._exit(9)
        if MODE in ("hangs", "stubborn-hangs"):
            time.sleep(FOREVER)
        if MODE == "status-500":
            return self.send(500, "Internal Server Error")
        count = body["sampling_params"]["max_new_tokens"]
        with BUSY:
            BUSY.started(count)
            if body.get("stream"):
                # Its client may leave it.
                with contextlib.suppress(ConnectionError):
                    return self.stream(body["input_ids"], count, body.get("rid", ""))
                return None
            if BUSY.on:
                time.sleep(0.002)
            answer = self.model.generate(body)
        return self.send(200, answer)

    def stream(self, tokens: list[int], count: int, rid: str) -> None:
        self.send_response(200)
        self.end_headers()
        whole = self.model.answer(tokens, count, -1)
        output = whole["output_ids"]
        ends = [*range(TOKENS_PER_STEP, count, TOKENS_PER_STEP), count]
        for step, end in enumerate(ends):
            if step == 3 and MODE == "dies-mid-stream":
                die("CUDA error: device-side assert triggered")
            if step == 3 and MODE == "stops-mid-stream":
                return
            BUSY.step()
            meta = {**whole["meta_info"], "completion_tokens": end}
            content: Any = {"text": "a" * end, "output_ids": output[:end], "meta_info": meta}
            if gone := BUSY.gone(rid):
                meta["finish_reason"] = {"type": "abort", "message": "aborted"}
                BUSY.leaked += MODE in ("leaks", "leaks-unseen")
            if step == 3 and MODE in STREAM_RUBBISH:
                content = STREAM_RUBBISH[MODE]
            text = content if isinstance(content, str) else json.dumps(content)
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()
            if gone:
                break
        self.wfile.write(b"data: [DONE]\n\n")


STREAM_RUBBISH = {
    "stream-error": {"error": {"message": "out of pages"}},
    "stream-broken-json": '{"output_ids": [1,',
    "stream-null": {"output_ids": None},
    "stream-number": {"output_ids": 7},
    "stream-text": {"output_ids": "the tokens, as text"},
    "stream-shrinks": {"output_ids": []},
}


def die(message: str) -> None:
    try:
        raise RuntimeError(message)
    except RuntimeError:
        import traceback

        traceback.print_exc()
    os._exit(1)


def have_scheduler() -> None:
    """A child under the scheduler's title; where it ends, so does the server, as SGLang's do."""
    code = f"import time; print(1, flush=True); time.sleep({FOREVER})"
    child = subprocess.Popen(
        ["sglang::scheduler", "-S", "-c", code], executable=sys.executable, stdout=subprocess.PIPE
    )
    child.stdout.readline()

    def watch() -> None:
        child.wait()
        if MODE == "unwatched":
            BUSY.dead = True
            return
        print("Subprocess scheduler_0 crashed with exit code -9.", flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Listener(ThreadingHTTPServer):
    # The default of 5 drops connections of a load.
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--enable-metrics", action="store_true")
    options, _ = parser.parse_known_args()
    print(f"serving {options.model_path} --port={options.port}", flush=True)
    if MODE == "crashes":
        print("[2026-01-01 TP0] Capture cuda graph begin", flush=True)
        raise AttributeError("'NoneType' object has no attribute 'shape'")
    if MODE == "quits":
        sys.exit(3)
    if MODE in ("stubborn", "stubborn-hangs", "never-serves"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if MODE in ("stubborn", "stubborn-hangs", "never-serves", "orphan"):
        ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if MODE != "orphan" else ""
        code = f"import signal, time; {ignore}print('child', flush=True); time.sleep({FOREVER})"
        child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
        child.stdout.readline()
    if MODE in ("never-serves", "never-listens"):
        time.sleep(FOREVER)
    if options.enable_metrics:
        BUSY.on = True
        sys.stdout.reconfigure(line_buffering=True)
        have_scheduler()
    Listener((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()

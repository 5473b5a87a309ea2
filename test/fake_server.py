"""A stand-in for ``sglang.launch_server`` without SGLang: greedy tokens are hashes of the text.

It takes the same options and has a prefix cache of whole pages. With ``--enable-metrics`` it acts
as a server under load: at most eight requests run, a child process is its scheduler, its log tells
of queue and retraction, and ``/metrics`` of its pools.

``FAKE_SERVER``, or the body of ``POST /fault`` from then on, says what is wrong with it:

``NAME``         a fault that ``has`` asks for below
``PATH=JSON``    a value in the last answer, such as ``output_ids/0="a"``; no JSON: it is missing
``=TEXT``        what ``/generate`` answers
``stream=TEXT``  the fourth message of a stream
"""

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
import traceback
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fake_trace

VOCABULARY = 500
PAGE = 128
RUNNING = 8
WAVE_TOKENS = 300
FOREVER = 3600
# A pool of tokens, one of the window's, and one of conv states.
POOLS = {"kv": 100_000 * PAGE, "swa": 100_000 * PAGE, "mamba": 100_000}

fault = os.environ.get("FAKE_SERVER", "healthy")


def has(*faults: str) -> bool:
    return fault in faults


def mix(state: int) -> int:
    state = (state ^ (state >> 31)) * 0x9E3779B97F4A7C15 % 2**64
    return state ^ (state >> 29)


def hash_prefixes(tokens: Sequence[int]) -> Iterator[int]:
    """A number for every prefix of ``tokens``, the empty one first."""
    state = 1
    yield state
    for token in tokens:
        state = mix(state + token + 1)
        yield state


def score(tokens: Sequence[int]) -> list[float]:
    """The logprob of each token after those before it."""
    return [-10 * mix(state + 7) / 2**64 for state in [*hash_prefixes(tokens)][1:]]


def extend(tokens: Sequence[int], count: int) -> list[int]:
    """``tokens`` and the ``count`` most probable ones after them."""
    (*_, state), whole = hash_prefixes(tokens), list(tokens)
    for _ in range(count):
        whole.append(mix(state + 3) % VOCABULARY)
        state = mix(state + whole[-1] + 1)
    return whole


class Model:
    def __init__(self) -> None:
        self.cache: set[int] = set()
        self.calls = 0
        self.profile: dict[str, Any] | None = None

    def flush(self) -> None:
        if not has("never-flushes"):
            self.cache.clear()

    def answer(self, tokens: list[int], count: int, scored_from: int) -> dict[str, Any]:
        whole, step = extend(tokens, count), 1 if has("accepts-less") else 2
        prefixes, scores = [*hash_prefixes(whole)], score(whole)
        limit = len(tokens) - 1 if scored_from < 0 else min(scored_from, len(tokens) - 1)
        pages = range(PAGE, limit + 1, PAGE)
        cached = max((n for n in pages if prefixes[n] in self.cache), default=0)
        self.cache.update(prefixes[PAGE::PAGE])
        if has("never-hits"):
            cached = 0
        if has("stale") and cached:
            scores[len(tokens) :] = [score * 1.5 for score in scores[len(tokens) :]]
        entries = [[score, token, None] for score, token in zip(scores, whole, strict=True)]
        meta = {
            "cached_tokens": cached,
            "completion_tokens": count,
            "finish_reason": {"type": "length", "length": count},
            "output_token_logprobs": entries[len(tokens) :],
            "spec_verify_ct": -(-count // step),
            "spec_accept_histogram": [count % step, count // step],
        }
        if scored_from >= 0:
            meta["input_token_logprobs"] = scored = entries[scored_from : len(tokens)]
            scored[0] = [None, *scored[0][1:]]
        if has("other-logprob") and count > 200:
            move_by_one_ulp(meta["output_token_logprobs"][7])
        if has("corrupts") and scored_from < 0 and count:
            move_by_one_ulp(meta["output_token_logprobs"][0])
        if has("drifts") and BUSY.ended > 100 and count:
            whole[-1] = (whole[-1] + 1) % VOCABULARY
        if has("does-not-speculate"):
            del meta["spec_verify_ct"]
        return {"output_ids": whole[len(tokens) :], "meta_info": meta}

    def generate(self, body: dict[str, Any]) -> Any:
        self.calls += 1
        count, prompts = body["sampling_params"]["max_new_tokens"], body["input_ids"]
        scored_from = body.get("logprob_start_len", -1)
        is_single = isinstance(prompts[0], int)
        if self.profile and not is_single:
            self.write_trace(len(prompts))
        answers = [
            self.answer(ids, count, scored_from) for ids in ([prompts] if is_single else prompts)
        ]
        if has("aborts"):
            answers[0]["meta_info"]["finish_reason"] = {"type": "abort"}
        if has("one-ulp") and scored_from == 0:
            move_by_one_ulp(answers[-1]["meta_info"]["input_token_logprobs"][-1])
        path, is_edit, value = fault.partition("=")
        if is_edit and path:
            with contextlib.suppress(LookupError, TypeError):
                put(answers[-1], path.split("/"), value)
        return answers[0] if is_single else answers

    def write_trace(self, batch: int) -> None:
        """As SGLang does it with ``profile_by_stage``, in the middle of a generation."""
        request, self.profile = self.profile, None
        folder = Path(request["output_dir"])
        fake_trace.write(folder / "1-TP-0-EXTEND.trace.json.gz", [])
        if has("writes-no-trace"):
            return
        draft = fake_trace.DRAFT[has("tracks-nothing") :]
        events = fake_trace.trace(request["num_steps"], batch=batch, draft=(draft,))
        trace = folder / "1-TP-0-DECODE.trace.json.gz"
        fake_trace.write(trace, events)
        if has("cuts-the-trace"):
            trace.write_bytes(trace.read_bytes()[:-100])


def move_by_one_ulp(entry: list[Any]) -> None:
    entry[0] = math.nextafter(entry[0], 0)


def put(node: Any, path: Sequence[str], value: str) -> None:
    """Put ``value``, JSON, at ``path``; take the field out if it is empty."""
    keys = [int(key) if key.isdigit() else key for key in path]
    for key in keys[:-1]:
        node = node[key]
    if value:
        node[keys[-1]] = json.loads(value)
    else:
        del node[keys[-1]]


class Busy:
    """The slots of a server, what it counts, and what it logs. One ``with`` block is a request."""

    def __init__(self) -> None:
        self.on = self.dead = False
        self.slots = threading.Semaphore(10**6 if has("never-queues") else RUNNING)
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
                running = min(self.running, RUNNING)
                print(f"Prefill, #running-req: {running}, #queue-req: {self.count_queued()}")

    def __exit__(self, *_: object) -> None:
        self.hang_if_dead()
        with self.lock:
            self.running -= 1
            self.ended += 1
            if has("grows"):
                # Not zeros, which take no memory before they are written.
                self.ballast.append(b"x" * 2**20)
        self.slots.release()

    def hang_if_dead(self) -> None:
        """Without a scheduler nobody answers, and here nobody says so."""
        if self.dead:
            time.sleep(FOREVER)

    def count_queued(self) -> int:
        return 0 if has("never-queues") else self.waiting

    def is_aborted(self, rid: str) -> bool:
        """As SGLang does it: by the beginning of the id."""
        return not has("ignores-aborts") and rid.startswith(tuple(self.aborted))

    def describe(self, cached: int) -> str:
        """The text of ``/metrics``, with ``cached`` pages in the prefix cache."""
        gauges = {"num_running_reqs": self.running, "num_queue_reqs": self.count_queued()}
        for pool, total in POOLS.items():
            size, leaked = (1, self.leaked) if pool == "mamba" else (PAGE, 0)
            used = size * self.running + leaked
            if has("leaks-unseen") and leaked:
                used, total = 0, total - leaked
            evictable = size * cached
            gauges |= {
                f"{pool}_used_tokens": used,
                f"{pool}_evictable_tokens": evictable,
                f"{pool}_available_tokens": total - used - evictable,
            }
        lines = [f'sglang:{name}{{tp_rank="0"}} {value}.0' for name, value in gauges.items()]
        return "\n".join(["sglang:fwd_occupancy NaN", *lines, ""])


BUSY = Busy()


def start_scheduler() -> None:
    """A child under the scheduler's title; where it ends, so does the server, as SGLang's do."""
    child = start_child("pass", title="sglang::scheduler")

    def watch() -> None:
        child.wait()
        if has("unwatched"):
            BUSY.dead = True
            return
        print("Subprocess scheduler_0 crashed with exit code -9.", flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


COMMAND = (sys.executable, "-S", __file__)


def make_server(folder: Path, marker: str = "X", fault: str = "healthy", **options: Any) -> Any:
    """A ``Server`` of this file, with its log in ``folder`` and ``marker`` in its environment."""
    from inkling_sconv.proof.server import Server

    options = {"start_seconds": 30, "request_seconds": 30, "command": COMMAND, **options}
    arguments = options.pop("arguments", ())
    environment = {"FAKE_SERVER": fault, marker: "1"}
    return Server(folder, arguments, folder / "log", environment=environment, **options)


def find_marked(marker: str) -> list[str]:
    """The processes with ``marker`` in their environment, without zombies."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        # An ended process has no environment to read, and may be gone altogether.
        with contextlib.suppress(OSError):
            if marker.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


class Handler(BaseHTTPRequestHandler):
    model = Model()

    def log_message(self, *_: object) -> None:
        pass

    def send(self, status: int, text: str) -> None:
        # latin-1: a fault may be a byte that is not UTF-8.
        content = text.encode("latin-1")
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if has("silent-health"):
            time.sleep(FOREVER)
        if self.path == "/metrics":
            return self.send(200, BUSY.describe(len(self.model.cache)) if BUSY.on else "")
        return self.send(503 if has("unhealthy") else 200, "{}")

    def do_POST(self) -> None:
        global fault
        text = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/fault":
            fault = json.loads(text)
            self.model.cache.clear()
            return self.send(200, "")
        if self.path.startswith("/flush_cache"):
            self.model.flush()
            return self.send(400 if has("refuses-to-flush") else 200, "Cache flushed.\n")
        body = json.loads(text)
        if self.path == "/start_profile":
            self.model.profile = body
            return self.send(200, "Start profiling.\n")
        if self.path == "/abort_request":
            BUSY.aborted.add(body["rid"])
            return self.send(200, "")
        return self.generate(body)

    def generate(self, body: dict[str, Any]) -> None:
        stream, count = body.get("stream"), body["sampling_params"]["max_new_tokens"]
        if not stream:
            print("generating", flush=True)
        if has("dies") and self.model.calls:
            die("CUDA error: an illegal memory access was encountered")
        if has("orphan"):
            os._exit(9)
        if has("hangs", "stubborn-hangs"):
            time.sleep(FOREVER)
        if has("status-500"):
            return self.send(500, "Internal Server Error")
        if fault.startswith("="):
            return self.send(200, fault[1:])
        with BUSY:
            if BUSY.on and count == WAVE_TOKENS and not has("never-retracts"):
                print("KV cache pool is full. Retract requests. #retracted_reqs: 1, #more: 0")
            if stream:
                # Its client may leave it.
                with contextlib.suppress(ConnectionError):
                    self.stream(body["input_ids"], count, body.get("rid", ""))
                return None
            if BUSY.on:
                time.sleep(0.005)
            answer = self.model.generate(body)
        return self.send(200, json.dumps(answer))

    def stream(self, tokens: list[int], count: int, rid: str) -> None:
        self.send_response(200)
        self.end_headers()
        whole = self.model.answer(tokens, count, -1)
        per_step = 1 if has("accepts-less") else 2
        ends = [*range(per_step, count, per_step), count]
        for step, end in enumerate(ends):
            if step == 3 and has("dies-mid-stream"):
                die("CUDA error: device-side assert triggered")
            if step == 3 and has("stops-mid-stream"):
                return
            if BUSY.on:
                # A step takes its time; otherwise every abort would be late.
                time.sleep(0.001)
            meta = {**whole["meta_info"], "completion_tokens": end}
            if aborted := BUSY.is_aborted(rid):
                meta["finish_reason"] = {"type": "abort", "message": "aborted"}
                BUSY.leaked += has("leaks", "leaks-unseen")
            message = {"text": "a" * end, "output_ids": whole["output_ids"][:end]}
            text = json.dumps({**message, "meta_info": meta})
            if step == 3 and fault.startswith("stream="):
                text = fault.partition("=")[2]
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()
            if aborted:
                break
        self.wfile.write(b"data: [DONE]\n\n")


def die(message: str) -> None:
    try:
        raise RuntimeError(message)
    except RuntimeError:
        traceback.print_exc()
    os._exit(1)


def start_child(code: str, title: str = sys.executable) -> subprocess.Popen[bytes]:
    """A child process that runs ``code``, and then stays; it has begun when this returns."""
    code = f"import signal, time; {code}; print(1, flush=True); time.sleep({FOREVER})"
    child = subprocess.Popen(
        [title, "-S", "-c", code], executable=sys.executable, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    return child


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model-path", "--host", "--port"):
        parser.add_argument(name, required=True)
    parser.add_argument("--enable-metrics", action="store_true")
    options, _ = parser.parse_known_args()
    print(f"serving {options.model_path} --port={options.port}", flush=True)
    if has("crashes"):
        print("[2026-01-01 TP0] Capture cuda graph begin", flush=True)
        raise AttributeError("'NoneType' object has no attribute 'shape'")
    if has("quits"):
        sys.exit(3)
    if has("stubborn-hangs", "never-serves"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        start_child("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    if has("orphan"):
        start_child("pass")
    if has("never-serves", "never-listens"):
        time.sleep(FOREVER)
    if options.enable_metrics:
        BUSY.on = True
        sys.stdout.reconfigure(line_buffering=True)
        start_scheduler()
    # The default of 5 drops connections of a load.
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer((options.host, int(options.port)), Handler).serve_forever()


if __name__ == "__main__":
    main()

"""A real ``sglang.launch_server`` as a context manager, and a client for it."""

import contextlib
import importlib.metadata
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import requests

from inkling_sconv.errors import UserError

HOST = "127.0.0.1"
# Below the ports of outgoing connections (32768 to 60999), so that none of them takes the port
# before the server listens.
PORTS = (20000, 30000)
_GIVEN_PORTS: set[int] = set()
# The scheduler needs some of this time to give its CUDA context back.
GRACE_SECONDS = 30
_PREFILL_GRAPH = re.compile(
    r"Capture target prefill CUDA graph begin\. backend=(?:\w+\.)?(\w+), num_tokens=\[([\d, ]+)\]"
)
# An exception, or what argparse says of an option.
_EXCEPTION = re.compile(
    r"^(?:\[[^]]*\] )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$|^([\w. -]+: error: .+)$"
)
_FRAME = re.compile(r'^File "(?:[^"]*/)?(sglang/[^"]+)", line \d+, in (\S+)')

BASE_OPTIONS = (
    "--page-size=128",
    "--mamba-radix-cache-strategy=extra_buffer",
    "--mamba-track-interval=128",
    "--attention-backend=fa4",
    "--enable-deterministic-inference",
    "--cuda-graph-max-bs-decode=8",
    "--max-running-requests=8",
    # Enough for every prompt here, and small enough for several servers on one GPU.
    "--mem-fraction-static=0.3",
    "--max-total-tokens=131072",
    "--max-mamba-cache-size=512",
    "--grammar-backend=none",
    "--skip-server-warmup",
    # Every further size takes 12 s to compile. Longer prefills run without a graph.
    "--cuda-graph-bs-prefill",
    "256",
    "1024",
)
"""A small server. Without determinism, the batch size changes the last bits of its answers."""

LAZY_OPTION = "--mamba-radix-cache-strategy=extra_buffer_lazy"
"""A request has its second checkpoint slot near boundaries only."""

TINY_OPTIONS = ("--skip-tokenizer-init",)
"""For the tiny checkpoint: SGLang 0.5.23 refuses every tokenizer but that of the released ones."""


def list_mtp_options(heads: int) -> tuple[str, ...]:
    """List the options for ``heads`` of Inkling's own MTP heads, each a draft step."""
    return (
        "--speculative-algorithm=EAGLE",
        "--enable-multi-layer-eagle",
        f"--speculative-num-steps={heads}",
        "--speculative-eagle-topk=1",
        f"--speculative-num-draft-tokens={heads + 1}",
    )


class ServerError(UserError):
    """The server failed or gave an unusable answer. The message ends with the log's path."""


class Server:
    """``python -m sglang.launch_server --model-path MODEL OPTIONS`` on a free port.

    Use it as a context manager. Entering waits until ``/health`` answers; leaving ends the server's
    process group in every case. The log file stays.

    Args:
        model: the checkpoint's directory.
        options: further command-line options.
        log: the file that receives the server's output.
        environment: variables to add to those of this process.
        start_seconds: how long the server may take until it answers ``/health``.
        request_seconds: how long one request may take.
        command: what to run in place of SGLang; tests use it.
    """

    def __init__(
        self,
        model: Path,
        options: Sequence[str],
        log: Path,
        *,
        environment: dict[str, str] | None = None,
        start_seconds: float = 600,
        request_seconds: float = 300,
        command: Sequence[str] = (sys.executable, "-m", "sglang.launch_server"),
    ):
        self.log = log
        self.start_seconds = start_seconds
        self.request_seconds = request_seconds
        self.port = find_free_port()
        arguments = (f"--model-path={model}", f"--host={HOST}", f"--port={self.port}", *options)
        self.command = [*command, *arguments]
        self.environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.session = requests.Session()
        # A proxy named in the environment cannot reach this machine's loopback.
        self.session.trust_env = False
        # More than the threads that use it at once.
        self.session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=64))
        # The server may drop an idle connection just as the next request is sent on it.
        self.session.headers["Connection"] = "close"

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> "Server":
        try:
            self.launch()
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def launch(self) -> None:
        """Start the server's processes. Whoever calls this calls ``stop``."""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A process group: one signal reaches the scheduler and the detokenizer too.
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until ``/health`` answers.

        Raises:
            ServerError: the server ended, or took too long.
        """
        assert self.process is not None
        deadline = time.monotonic() + self.start_seconds
        why, pause = "", 0.05
        while (left := deadline - time.monotonic()) > 0:
            if self.process.poll() is not None:
                code = self.process.returncode
                raise self.make_error(f"it ended with {code} before it served", of_start=True)
            with contextlib.suppress(requests.RequestException):
                status = self.session.get(f"{self.url}/health", timeout=min(5, left)).status_code
                if status == 200:
                    return
                why = f" (/health: status {status})"
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.5)
        raise self.make_error(f"it did not serve within {self.start_seconds:.0f} s{why}")

    def stop(self) -> None:
        """End the server's process group: with SIGTERM, then with SIGKILL.

        A second Ctrl-C while this waits goes to SIGKILL at once.
        """
        self.session.close()
        if self.process is None:
            return
        try:
            self._signal(signal.SIGTERM, GRACE_SECONDS)
        finally:
            self._signal(signal.SIGKILL, 5)

    def _signal(self, number: signal.Signals, seconds: float) -> None:
        """Send a signal to the group's running processes, and wait for them to end."""
        assert self.process is not None
        group = self.process.pid
        deadline = time.monotonic() + seconds
        if _list_running(group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
        # Reap the leader last: until then, no other group can get its id.
        while _list_running(group) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.process.poll()

    def make_error(self, what: str, *, of_start: bool = False) -> ServerError:
        """Make the error for ``what``. It begins with the last exception in the log.

        If it is ``of_start``, SGLang's version comes before that.
        """
        last = find_last_exception(self.log)
        if last and of_start:
            last = f"{_name_release()} did not start: {last}"
        return ServerError(f"{last + '; ' if last else ''}server: {what}; log: {self.log}")

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST ``body`` as JSON. Returns the parsed answer, or its text if it is not JSON.

        Raises:
            ServerError: no answer, or an error status.
        """
        answer = self._request("POST", path, body)
        try:
            return answer.json()
        # A very long integer or deep nesting raises an error other than JSONDecodeError.
        except (ValueError, RecursionError):
            return answer.text

    def get(self, path: str) -> str:
        """GET ``path``. Returns the answer's text.

        Raises:
            ServerError: no answer, or an error status.
        """
        return self._request("GET", path).text

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, stream: bool = False
    ) -> requests.Response:
        what = "stream" if stream else path
        try:
            answer = self.session.request(
                method, f"{self.url}{path}", json=body, timeout=self.request_seconds, stream=stream
            )
        except requests.RequestException as error:
            raise self.make_error(f"{what}: no answer ({type(error).__name__})") from None
        if answer.status_code != 200:
            raise self.make_error(f"{what}: status {answer.status_code}: {answer.text[:200]!r}")
        return answer

    def list_processes(self) -> dict[int, str]:
        """List the command lines of the group's running processes, by process id.

        SGLang's processes show a title instead, such as ``sglang::scheduler``.
        """
        found = {}
        for number in _list_running(self.process.pid) if self.process else ():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{number}/cmdline").read_bytes()
                found[number] = line.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def measure_memory(self) -> int:
        """Sum the group's resident memory in bytes. A shared page counts for each process."""
        total = 0
        for number in self.list_processes():
            with contextlib.suppress(OSError):
                pages = Path(f"/proc/{number}/statm").read_text().split()[1]
                total += int(pages) * resource.getpagesize()
        return total

    def flush(self) -> None:
        """Empty the prefix cache."""
        self.post("/flush_cache?timeout=30")

    def generate(
        self, input_ids: Sequence[Sequence[int]], new_tokens: int, *, scored_from: int = -1
    ) -> list[dict[str, Any]]:
        """Generate greedily, with logprobs: one answer per prompt.

        Args:
            input_ids: token ids of each prompt.
            new_tokens: tokens to generate for each, at least 0.
            scored_from: index of the first prompt token whose logprob is returned; -1 for none.

        Raises:
            ServerError: as ``post``, or a field of an answer is missing or malformed.
        """
        body = make_request(
            [list(ids) for ids in input_ids],
            new_tokens,
            return_logprob=True,
            return_text_in_logprobs=False,
            logprob_start_len=scored_from,
        )
        answers = self.post("/generate", body)
        if not (isinstance(answers, list) and len(answers) == len(input_ids)):
            raise self.make_error(
                f"/generate: not {len(input_ids)} answers: {str(answers)[:200]!r}"
            )
        for answer in answers:
            fault = _find_fault(answer, new_tokens, scored=scored_from >= 0)
            if fault is not None:
                raise self.make_error(f"/generate: {fault}: {str(answer)[:200]!r}")
        return answers

    def stream(self, input_ids: Sequence[int], new_tokens: int) -> list[list[int]]:
        """Generate greedily. Returns the new tokens of each message; a server sends one a step.

        Raises:
            ServerError: no answer, an error status, or the stream breaks off.
        """
        groups: list[list[int]] = []
        seen = 0
        for message in self.read_stream(make_request(list(input_ids), new_tokens)):
            output = message.get("output_ids")
            if not isinstance(output, list) or len(output) < seen:
                raise self.make_error(f"stream: after {seen} tokens: {str(message)[:200]!r}")
            groups.append(output[seen:])
            seen = len(output)
        if seen != new_tokens:
            raise self.make_error(f"stream: {seen} tokens of {new_tokens}")
        return groups

    def read_stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """POST ``body`` to ``/generate`` and yield each message of the answer as it arrives.

        Raises:
            ServerError: no answer, an error status, or the stream breaks off.
        """
        answer = self._request("POST", "/generate", {**body, "stream": True}, stream=True)
        try:
            with answer:
                for line in answer.iter_lines():
                    if line.startswith(b"data: {"):
                        yield json.loads(line[len(b"data: ") :])
        except (requests.RequestException, ValueError, RecursionError) as error:
            raise self.make_error(f"stream: broke off ({type(error).__name__})") from None


def make_request(input_ids: Any, new_tokens: int, **fields: Any) -> dict[str, Any]:
    """Make the body of a ``/generate`` request: greedy, and exactly ``new_tokens`` tokens."""
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": input_ids, "sampling_params": sampling, **fields}


def _find_fault(answer: Any, new_tokens: int, *, scored: bool) -> str | None:
    """Find the first missing or malformed field of a ``/generate`` answer."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        return "no meta_info"
    # A server that does not speculate has no spec_verify_ct.
    counts = {"spec_verify_ct": 0, **meta}
    for name in ("cached_tokens", "completion_tokens", "spec_verify_ct"):
        count = counts.get(name)
        if type(count) is not int or not 0 <= count < 2**53:
            return f"{name} is not a count"
    if scored and not _are_logprobs(meta.get("input_token_logprobs")):
        return "no input_token_logprobs"
    # If ``new_tokens`` is 0, SGLang still samples a token, which callers do not read.
    if new_tokens:
        tokens = answer.get("output_ids")
        if not (isinstance(tokens, list) and all(type(token) is int for token in tokens)):
            return "no output_ids"
        if len(tokens) != new_tokens:
            return f"{len(tokens)} output_ids of {new_tokens}"
        scores = meta.get("output_token_logprobs")
        if not (_are_logprobs(scores) and len(scores) == new_tokens):
            return f"no {new_tokens} output_token_logprobs"
    return None


def _are_logprobs(entries: Any) -> TypeGuard[list[Any]]:
    if not isinstance(entries, list) or not entries:
        return False
    return all(isinstance(entry, list) and entry and _is_logprob(entry[0]) for entry in entries)


def _is_logprob(value: Any) -> bool:
    # SGLang's JSON writer sends None for NaN. An integer must be one that a double holds.
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 2**53)


def find_last_exception(log: Path) -> str | None:
    """Find the last line of ``log`` that names an exception, and where SGLang raised it.

    With its innermost frame in SGLang: ``sglang/srt/FILE.py, FUNCTION: EXCEPTION``. An exception
    that has such a frame comes before later ones without, which follow from it; what argparse says
    of an option comes before both.
    """
    frame, bare, placed = None, None, None
    for line in map(str.strip, (read_log(log) or "").splitlines()):
        if "Traceback (most recent call last)" in line:
            frame = None
        elif match := _FRAME.match(line):
            frame = match
        elif match := _EXCEPTION.match(line):
            if match[2]:
                return match[2]
            bare = match[1]
            if frame:
                placed, frame = f"{frame[1]}, {frame[2]}: {bare}", None
    return placed or bare


def _name_release() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"SGLang {importlib.metadata.version('sglang')}"
    return "SGLang"


def find_prefill_graph(log: Path) -> str:
    """Find the backend and the sizes of the prefill graphs that a server captured, or ``none``.

    ``unknown``, if the log cannot be read.
    """
    text = read_log(log)
    if text is None:
        return "unknown"
    found = _PREFILL_GRAPH.search(text)
    return f"{found[1].lower()} ({found[2]} tokens)" if found else "none"


def read_log(log: Path) -> str | None:
    """Read a log. None, if it is not a regular file: reading a pipe would wait for its writer."""
    try:
        return log.read_text(errors="replace") if log.is_file() else None
    except OSError:
        return None


def find_free_port() -> int:
    """Find a port in ``PORTS`` that is free now, and that this process was not given before.

    Raises:
        ServerError: 100 random ones are taken.
    """
    for _ in range(100):
        port = random.randrange(*PORTS)
        if port in _GIVEN_PORTS:
            continue
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind((HOST, port))
            _GIVEN_PORTS.add(port)
            return port
    raise ServerError(f"no free port among 100 from {PORTS[0]} to {PORTS[1]}")


def _list_running(group: int) -> list[int]:
    """List the ids of a process group's processes that have not ended.

    A zombie has ended. In a container whose process 1 reaps nothing, zombies stay.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # Field 2 is the name, in parentheses; it may contain spaces and parentheses.
            state, _, of = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                found.append(int(process.name))
    return found

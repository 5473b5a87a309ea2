"""A real ``sglang.launch_server`` for as long as a ``with`` block, and requests to it."""

from __future__ import annotations

import contextlib
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
from typing import Any

import requests

from inkling_sconv.errors import UserError

HOST = "127.0.0.1"
PORTS = (20000, 30000)
# 30 s to end by itself: the scheduler gives its CUDA context back.
GRACE_SECONDS = 30
_EXCEPTION = re.compile(r"^(?:\[[^]]*\] )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$")

MTP_OPTIONS = (
    "--speculative-algorithm=EAGLE",
    "--enable-multi-layer-eagle",
    "--speculative-num-steps=2",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=3",
    "--cuda-graph-backend-prefill=disabled",
)
"""Inkling's own MTP heads, two draft steps. With them, 0.5.17 and 0.5.18 have no prefill graph."""

BASE_OPTIONS = (
    "--page-size=128",
    "--mamba-radix-cache-strategy=extra_buffer",
    "--mamba-track-interval=128",
    "--attention-backend=fa4",
    "--enable-deterministic-inference",
    "--cuda-graph-max-bs-decode=8",
    "--max-running-requests=8",
    # Far more than the prompts need, and little beside what else runs on the GPU.
    "--mem-fraction-static=0.3",
    "--max-total-tokens=131072",
    "--max-mamba-cache-size=512",
    "--grammar-backend=none",
    "--skip-server-warmup",
)
"""A small deterministic server: without determinism, batch sizes would show in the last bits."""


class ServerError(UserError):
    """The server is not there, or its answer is none. The message ends with the log's path."""


class Server:
    """``python -m sglang.launch_server --model-path MODEL OPTIONS`` on a free port.

    Use as a context manager. Entering waits until the server answers; leaving ends its process
    group, whatever happened. The log stays.
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
        self.port = _free_port()
        arguments = (f"--model-path={model}", f"--host={HOST}", f"--port={self.port}", *options)
        self.command = [*command, *arguments]
        self.environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.session = requests.Session()
        # No proxy of the environment's: it cannot reach this machine's own loopback.
        self.session.trust_env = False
        # No connection is kept: the server may drop an idle one as the next request is sent.
        self.session.headers["Connection"] = "close"

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    def __enter__(self) -> Server:
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    self.command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # A group of its own: one signal reaches the scheduler and the detokenizer too.
                    start_new_session=True,
                )
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + self.start_seconds
        why = ""
        while (left := deadline - time.monotonic()) > 0:
            if self.process.poll() is not None:
                raise self.error(f"it ended with {self.process.returncode} before it served")
            with contextlib.suppress(requests.RequestException):
                status = self.session.get(f"{self.url}/health", timeout=min(5, left)).status_code
                if status == 200:
                    return
                why = f" (/health: status {status})"
            time.sleep(min(0.5, left))
        raise self.error(f"it did not serve within {self.start_seconds:.0f} s{why}")

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
        """Send a signal to what lives of the group, and wait for its end."""
        assert self.process is not None
        group = self.process.pid
        deadline = time.monotonic() + seconds
        if _lives(group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)
        # The leader is reaped last: until then, its id is nobody else's.
        while _lives(group) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.process.poll()

    def error(self, what: str) -> ServerError:
        """The error for ``what``, with the last exception of the log on top."""
        last = last_exception(self.log)
        return ServerError(f"{last + '; ' if last else ''}server: {what}; log: {self.log}")

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """POST ``body`` as JSON; the answer as JSON, or as text where it is none.

        Raises:
            ServerError: no answer, an error status, or the server is gone.
        """
        try:
            answer = self.session.post(f"{self.url}{path}", json=body, timeout=self.request_seconds)
        except requests.RequestException as error:
            raise self.error(f"{path}: no answer ({type(error).__name__})") from None
        if answer.status_code != 200:
            raise self.error(f"{path}: status {answer.status_code}: {answer.text[:200]!r}")
        try:
            return answer.json()
        # Not JSONDecodeError alone: an integer can be too long, a list too deep.
        except (ValueError, RecursionError):
            return answer.text

    def get(self, path: str) -> str:
        """GET ``path``; the answer as text.

        Raises:
            ServerError: no answer, an error status, or the server is gone.
        """
        try:
            answer = self.session.get(f"{self.url}{path}", timeout=self.request_seconds)
        except requests.RequestException as error:
            raise self.error(f"{path}: no answer ({type(error).__name__})") from None
        if answer.status_code != 200:
            raise self.error(f"{path}: status {answer.status_code}: {answer.text[:200]!r}")
        return answer.text

    def processes(self) -> dict[int, str]:
        """What lives of the server's process group: command line by process id.

        SGLang's processes replace theirs with a title, such as ``sglang::scheduler``.
        """
        if self.process is None:
            return {}
        found = {}
        for number in _living(self.process.pid):
            with contextlib.suppress(OSError):
                line = (Path("/proc") / str(number) / "cmdline").read_bytes()
                found[number] = line.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def resident(self) -> int:
        """Bytes of memory that the group's processes hold; a shared page counts for each."""
        total = 0
        for number in self.processes():
            with contextlib.suppress(OSError):
                pages = (Path("/proc") / str(number) / "statm").read_text().split()[1]
                total += int(pages) * resource.getpagesize()
        return total

    def flush(self) -> None:
        """Empty the prefix cache."""
        self.post("/flush_cache?timeout=30")

    def generate(
        self, input_ids: Sequence[Sequence[int]], new_tokens: int, *, scored_from: int = -1
    ) -> list[dict[str, Any]]:
        """Greedy answers with logprobs, one a prompt; prompts are scored from ``scored_from`` on.

        ``scored_from`` -1 scores no prompt token.

        Raises:
            ServerError: as ``post``, or the answer has not the fields that are asked for.
        """
        answers = self.post(
            "/generate",
            {
                "input_ids": [list(ids) for ids in input_ids],
                "sampling_params": {
                    "temperature": 0.0,
                    "max_new_tokens": new_tokens,
                    "ignore_eos": True,
                },
                "return_logprob": True,
                "return_text_in_logprobs": False,
                "logprob_start_len": scored_from,
            },
        )
        if not (isinstance(answers, list) and len(answers) == len(input_ids)):
            raise self.error(f"/generate: not {len(input_ids)} answers: {str(answers)[:200]!r}")
        for answer in answers:
            lacking = _lacking(answer, new_tokens, scored=scored_from >= 0)
            if lacking is not None:
                raise self.error(f"/generate: {lacking}: {str(answer)[:200]!r}")
        return answers

    def stream(self, input_ids: Sequence[int], new_tokens: int) -> list[list[int]]:
        """Greedy tokens of one prompt, grouped as the server sent them: one group a decode step.

        Raises:
            ServerError: no answer, or it breaks off.
        """
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
            },
            "stream": True,
        }
        groups: list[list[int]] = []
        seen = 0
        try:
            with self.session.post(
                f"{self.url}/generate", json=body, stream=True, timeout=self.request_seconds
            ) as answer:
                if answer.status_code != 200:
                    raise self.error(f"stream: status {answer.status_code}: {answer.text[:200]!r}")
                for line in answer.iter_lines():
                    if not line.startswith(b"data: {"):
                        continue
                    output = json.loads(line[len(b"data: ") :])["output_ids"]
                    if not isinstance(output, list) or len(output) < seen:
                        raise self.error(f"stream: after {seen} tokens: {str(output)[:200]!r}")
                    groups.append(output[seen:])
                    seen = len(output)
        except (requests.RequestException, ValueError, KeyError, RecursionError) as error:
            raise self.error(f"stream: broke off ({type(error).__name__})") from None
        if seen != new_tokens:
            raise self.error(f"stream: {seen} tokens of {new_tokens}")
        return groups


def _lacking(answer: Any, new_tokens: int, *, scored: bool) -> str | None:
    """What an answer to ``generate`` has not, or not in the form that is read; None if nothing."""
    if not (isinstance(answer, dict) and isinstance(answer.get("meta_info"), dict)):
        return "no meta_info"
    meta = answer["meta_info"]
    for name in ("cached_tokens", "completion_tokens", "spec_verify_ct"):
        # A server that does not speculate counts no verifications.
        if name in meta or name != "spec_verify_ct":
            count = meta.get(name)
            if type(count) is not int or not 0 <= count < 2**53:
                return f"{name} is no count"
    if scored and not _are_logprobs(meta.get("input_token_logprobs")):
        return "no input_token_logprobs"
    # Nothing is read of a generation of no tokens; SGLang still samples one.
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


def _are_logprobs(entries: Any) -> bool:
    return (
        isinstance(entries, list)
        and len(entries) > 0
        and all(isinstance(entry, list) and entry and _is_logprob(entry[0]) for entry in entries)
    )


def _is_logprob(value: Any) -> bool:
    # None: SGLang's JSON writer has it for NaN too. The bound: an int that a double holds.
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 2**53)


def last_exception(log: Path) -> str | None:
    """The last line of the log that names an exception."""
    found = None
    with contextlib.suppress(OSError):
        for line in log.read_text(errors="replace").splitlines():
            match = _EXCEPTION.match(line.strip())
            found = match.group(1) if match else found
    return found


def _living(group: int) -> Iterator[int]:
    """Ids of the processes of a group that have not ended.

    Zombies have: where process 1 is no init, as in many a container, they stay.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything.
            state, _, of = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                yield int(process.name)


def _lives(group: int) -> bool:
    """Whether a process group has a process that has not ended."""
    return any(True for _ in _living(group))


def _free_port() -> int:
    # Below the ports of outgoing connections (32768 to 60999): the server listens a minute later,
    # and by then one of its own connections may have taken a port of that range.
    for _ in range(100):
        port = random.randrange(*PORTS)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind((HOST, port))
            return port
    raise ServerError(f"no free port among 100 from {PORTS[0]} to {PORTS[1]}")

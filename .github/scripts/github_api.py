"""What the scripts share: GitHub's API through ``gh``, and the variables and files of Actions."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

# The next job reads an output from one environment variable, and Linux takes 128 KiB in one.
MAX_OUTPUT = 100_000

T = TypeVar("T")


class ActionError(Exception):
    """GitHub, git or the environment failed. The message is one line."""


def run_command(script: str, command: Callable[[], int]) -> int:
    """Return the exit status of ``command``; print what it raises as one line, for status 1."""
    try:
        return command()
    except ActionError as error:
        reason = str(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        reason = f"{place}: {type(error).__name__}: {error}"
    # GitHub, git and the pull request's files choose the words of a reason.
    words = "".join(sign if sign.isprintable() else " " for sign in reason).split()
    print(f"{script}: {' '.join(words)[:500]}", file=sys.stderr)
    return 1


def run_tool(command: Sequence[str], data: bytes | None = None) -> bytes:
    """Return what ``command`` prints, given ``data`` on standard input.

    Raises:
        ActionError: The tool is missing or fails. The message ends in the last line of its errors.
    """
    try:
        return subprocess.run(command, input=data, check=True, capture_output=True).stdout
    except FileNotFoundError:
        raise ActionError(f"{command[0]} is not installed") from None
    except OSError as error:
        raise ActionError(f"{command[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().split("\n")
        raise ActionError(f"{' '.join(command)}: {lines[-1].strip()}") from None


def call_api(path: str, data: object = None, method: str = "POST", pages: bool = False) -> Any:
    """Call GitHub's API: GET, or ``method`` with ``data``. With ``pages``, return all items.

    Raises:
        ActionError: The call fails, or the answer is no JSON, or no pages of objects.
    """
    command = ["gh", "api", path, *(["--paginate", "--slurp"] if pages else [])]
    if data is not None:
        command += ["--method", method, "--input", "-"]
    answer = run_tool(command, None if data is None else json.dumps(data).encode())
    try:
        parsed = json.loads(answer or b"null")
        items = [item for page in parsed for item in page] if pages else []
    except (ValueError, TypeError, RecursionError):
        raise ActionError(f"GitHub's answer to {path} cannot be read") from None
    if not all(isinstance(item, dict) for item in items):
        raise ActionError(f"GitHub's answer to {path} is not a list of objects")
    return items if pages else parsed


def get_field(answer: Any, kind: type[T], *keys: str) -> T:
    """Return the field of an answer that ``keys`` lead to.

    Raises:
        ActionError: There is no such field, or it is not of type ``kind``.
    """
    for key in keys:
        answer = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(answer, kind):
        raise ActionError(f"GitHub's answer has no {kind.__name__} {'.'.join(keys)}")
    return answer


def read_variable(name: str) -> str:
    """Return an environment variable that the workflow sets."""
    try:
        return os.environ[name]
    except KeyError:
        raise ActionError(f"{name} is not set") from None


def write_output(name: str, value: str) -> None:
    """Set an output of the step, of at most ``MAX_OUTPUT`` bytes."""
    if "\n" in value:
        raise ActionError(f"output {name} has a line break")
    if (size := len(value.encode())) > MAX_OUTPUT:
        raise ActionError(f"output {name} has {size} bytes; {MAX_OUTPUT} are allowed")
    with Path(read_variable("GITHUB_OUTPUT")).open("a") as file:
        file.write(f"{name}={value}\n")


def get_repository() -> str:
    """Return the path of this repository in the API."""
    return f"repos/{read_variable('GITHUB_REPOSITORY')}"


def get_log_url() -> str:
    """Return the page of this run of the workflow."""
    server, repository = read_variable("GITHUB_SERVER_URL"), read_variable("GITHUB_REPOSITORY")
    return f"{server}/{repository}/actions/runs/{read_variable('GITHUB_RUN_ID')}"

"""What the scripts share: GitHub's API through ``gh``, and the variables and files of Actions."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class ActionError(Exception):
    """GitHub, git or the environment failed. The message is one line."""


def run_command(script: str, command: Callable[[], int]) -> int:
    """Return the exit status of ``command``; print an ``ActionError`` as one line, for status 1."""
    try:
        return command()
    except ActionError as error:
        print(f"{script}: {error}", file=sys.stderr)
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
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().split("\n")
        raise ActionError(f"{' '.join(command)}: {lines[-1].strip()}") from None


def call_api(path: str, data: object = None, method: str = "POST", pages: bool = False) -> Any:
    """Call GitHub's API: GET, or ``method`` with ``data``. With ``pages``, return all in a list."""
    command = ["gh", "api", path, *(["--paginate", "--slurp"] if pages else [])]
    if data is not None:
        command += ["--method", method, "--input", "-"]
    answer = run_tool(command, None if data is None else json.dumps(data).encode())
    return json.loads(answer or b"null")


def read_variable(name: str) -> str:
    """Return an environment variable that the workflow sets."""
    try:
        return os.environ[name]
    except KeyError:
        raise ActionError(f"{name} is not set") from None


def write_output(name: str, value: str) -> None:
    """Set an output of the step."""
    if "\n" in value:
        raise ActionError(f"output {name} has a line break")
    with Path(read_variable("GITHUB_OUTPUT")).open("a") as file:
        file.write(f"{name}={value}\n")


def get_repository() -> str:
    """Return the path of this repository in the API."""
    return f"repos/{read_variable('GITHUB_REPOSITORY')}"


def get_log_url() -> str:
    """Return the page of this run of the workflow."""
    server, repository = read_variable("GITHUB_SERVER_URL"), read_variable("GITHUB_REPOSITORY")
    return f"{server}/{repository}/actions/runs/{read_variable('GITHUB_RUN_ID')}"

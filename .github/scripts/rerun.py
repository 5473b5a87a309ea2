"""``/rerun-test``: from a pull request's comment to a pytest command, and back to an answer.

Each job of rerun-test.yml calls one command. It needs only the standard library: the jobs that
hold a token that can write run it from the base branch, with nothing installed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

COMMAND = "/rerun-test"
TRUSTED = ("OWNER", "MEMBER", "COLLABORATOR")
HOSTED = "ubuntu-latest"
SHORT = {
    "captures": "test_inkling_refresh_capture.py",
    "mtp": "test_inkling_mtp.py",
    "prefill": "test_inkling_prefill_graph.py",
    "soak": "test_inkling_soak.py",
}
ROOT, REGISTERED, NEEDS_GPU = "test/", "test/registered/", ("test/registered/", "test/gpu/")
MAX_COMMENT, MAX_WORDS, MAX_TESTS, MAX_FILE = 1000, 20, 100, 1_000_000

PLAIN = re.compile(r"[A-Za-z0-9_./: -]+")
SHA = re.compile(r"[0-9a-f]{40}")
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
SUITE = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")
# A part of a path starts with no dot and no dash: no `..`, no option.
FILE = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)*test_[A-Za-z0-9_]+\.py")
NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:::[A-Za-z_][A-Za-z0-9_]*)?")
SYMLINK = "120000"


class RefusedError(Exception):
    """The comment is not one that runs anything. The message is a line of the reply."""


class ActionError(Exception):
    """GitHub, git or the surroundings fail. The message is one line."""


@dataclass(frozen=True)
class Request:
    """What a comment asks for."""

    words: tuple[str, ...]
    runner: str | None = None
    commit: str | None = None


def read(body: str) -> Request | None:
    """The request in a comment; None for a comment that is not for us."""
    if body.split(maxsplit=1)[:1] != [COMMAND] or not body.startswith(COMMAND):
        return None
    if len(body) > MAX_COMMENT:
        raise RefusedError(f"The comment has {len(body)} characters; {MAX_COMMENT} are allowed.")
    body = body.rstrip()
    # Nothing of a text with other characters is repeated in the reply.
    if not PLAIN.fullmatch(body):
        raise RefusedError(
            "One line of ASCII letters, digits, spaces and `_` `.` `/` `:` `-`, please."
        )
    words = body.split(" ")[1:]
    words = [word for word in words if word]
    options: dict[str, str] = {}
    while len(words) >= 2 and words[-2] in ("on", "at") and words[-2] not in options:
        options[words[-2]] = words[-1]
        words = words[:-2]
    if not words:
        raise RefusedError("No test is named.")
    if len(words) > MAX_WORDS:
        raise RefusedError(f"{len(words)} words; {MAX_WORDS} are allowed.")
    for word in ("on", "at"):
        if word in words:
            raise RefusedError(f"`{word}` takes one word and comes after the tests, once.")
    return Request(tuple(dict.fromkeys(words)), options.get("on"), options.get("at"))


class Commit:
    """The files under ``test/`` in a commit, read from git's objects and never checked out."""

    def __init__(self, folder: Path, sha: str):
        self.folder, self.sha = folder, sha
        self.modes: dict[str, str] = {}
        listing = git(folder, "ls-tree", "-r", "-z", "--full-tree", sha, "test")
        for entry in listing.split(b"\0")[:-1]:
            meta, _, path = entry.partition(b"\t")
            self.modes[os.fsdecode(path)] = meta.split()[0].decode()

    def text(self, path: str) -> str:
        """The text of a file."""
        return git(self.folder, "cat-file", "blob", f"{self.sha}:{path}").decode(errors="replace")

    def file(self, path: str) -> str:
        """``path`` as it is in the commit: a regular file under ``test/``, by path or bare name."""
        if not FILE.fullmatch(path):
            raise RefusedError(f"`{path}` is no test file: `test_*.py` under `test/`.")
        if "/" not in path:
            found = [name for name in self.modes if name.rpartition("/")[2] == path]
            if len(found) > 1:
                raise RefusedError(f"{len(found)} files are named `{path}`; give the path.")
            path = found[0] if found else path
        elif not path.startswith(ROOT):
            raise RefusedError(f"`{path}` is outside `test/`.")
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            part = "/".join(parts[:end])
            if self.modes.get(part) == SYMLINK:
                raise RefusedError(f"`{path}` is or goes through a symbolic link.")
        if path not in self.modes:
            raise RefusedError(f"There is no `{path}` at {self.sha[:12]}.")
        return path

    def suites(self) -> dict[str, list[str]]:
        """The registered test files of each suite that they are enabled for."""
        found: dict[str, list[str]] = {}
        for path, mode in self.modes.items():
            if path.startswith(REGISTERED) and FILE.fullmatch(path) and mode != SYMLINK:
                for suite in sorted(suites(self.text(path))):
                    found.setdefault(suite, []).append(path)
        return found


def suites(text: str) -> set[str]:
    """The suites that a file registers for; SGLang's own parser (``sglang.test.ci``) decides so."""
    found = set()
    for node in parsed(text).body:
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            continue
        call = node.value
        if not (isinstance(call.func, ast.Name) and re.fullmatch(r"register_\w+_ci", call.func.id)):
            continue
        values = dict(zip(("est_time", "suite", "nightly", "disabled"), call.args, strict=False))
        values.update({keyword.arg: keyword.value for keyword in call.keywords if keyword.arg})
        known = {
            name: value.value for name, value in values.items() if isinstance(value, ast.Constant)
        }
        suite, stage, config = (known.get(n) for n in ("suite", "stage", "runner_config"))
        if isinstance(stage, str) and isinstance(config, str):
            suite = f"{stage}-test-{config}"
        # The names end up in replies, and a pull request may register any.
        if known.get("disabled") is None and isinstance(suite, str) and SUITE.fullmatch(suite):
            found.add(suite)
    return found


def parsed(text: str) -> ast.Module:
    """The syntax tree of a stranger's file; an empty one where Python has none."""
    try:
        if len(text) <= MAX_FILE:
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return ast.Module(body=[], type_ignores=[])


def tests(words: Iterable[str], commit: Commit) -> list[str]:
    """The pytest ids that ``words`` stand for, each once, in the order given."""
    found: dict[str, None] = {}
    known: dict[str, list[str]] | None = None
    for word in words:
        word = SHORT.get(word, word)
        file, _, names = word.partition("::")
        if file.endswith(".py"):
            path = commit.file(file)
            if word != file:
                if not NAMES.fullmatch(names):
                    raise RefusedError(
                        f"`{word}`: a file takes `::Class`, `::Class::test` or `::test`."
                    )
                first = names.partition("::")[0]
                defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
                nodes = ast.walk(parsed(commit.text(path)))
                if not any(isinstance(node, defined) and node.name == first for node in nodes):
                    raise RefusedError(f"`{path}` has no `{first}` at {commit.sha[:12]}.")
                path = f"{path}::{names}"
            found[path] = None
            continue
        known = commit.suites() if known is None else known
        if not SUITE.fullmatch(word) or word not in known:
            there = ", ".join(f"`{name}`" for name in sorted(known)[:20]) or "none"
            at = commit.sha[:12]
            raise RefusedError(
                f"`{word}` is neither a test file nor a suite. Suites at {at}: {there}."
            )
        found.update(dict.fromkeys(known[word]))
    if len(found) > MAX_TESTS:
        raise RefusedError(f"These are {len(found)} files; {MAX_TESTS} are allowed.")
    return list(found)


def runner(asked: str | None, ids: Iterable[str], gpu: Sequence[str]) -> str:
    """The label to run on: ``asked`` if it is allowed, else what the tests need."""
    if asked is not None:
        if asked not in (HOSTED, *gpu):
            raise RefusedError(f"`{asked}` is not a runner of this repository.")
        return asked
    if not any(name.startswith(NEEDS_GPU) for name in ids):
        return HOSTED
    if not gpu:
        raise RefusedError(
            "These tests need a GPU and this repository names no runner with one "
            "(repository variable `GPU_RUNNER`)."
        )
    return gpu[0]


def usage(gpu: Sequence[str]) -> str:
    """What is allowed, for the reply to what is not."""
    runners = ", ".join(f"`{label}`" for label in (HOSTED, *gpu))
    return (
        f"Allowed: `{COMMAND} WHAT... [on RUNNER] [at COMMIT]`, on one line.\n"
        "- WHAT: a test file under `test/` by path or bare name (`test_inkling_mtp.py`), "
        "`FILE::Class`, `FILE::Class::test`, a suite (`base-b-test-1-gpu-large`), or "
        + ", ".join(f"`{name}`" for name in SHORT)
        + f"\n- RUNNER: {runners}\n"
        "- COMMIT: the pull request's head, all 40 digits"
    )


def git(folder: Path, *arguments: str) -> bytes:
    """What git prints."""
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], check=True, capture_output=True
        ).stdout
    except subprocess.CalledProcessError as error:
        raise ActionError(f"git {arguments[0]}: {last_line(error.stderr)}") from None


def gh(path: str, data: object = None, method: str = "POST", pages: bool = False) -> Any:
    """What GitHub's API answers, a list of them with ``pages``; with ``data``, after sending it."""
    command = ["gh", "api", path]
    if pages:
        command += ["--paginate", "--slurp"]
    if data is not None:
        command += ["--method", method, "--input", "-"]
    sent = None if data is None else json.dumps(data).encode()
    try:
        answer = subprocess.run(command, input=sent, check=True, capture_output=True).stdout
        return json.loads(answer or b"null")
    except FileNotFoundError:
        raise ActionError("gh is not installed") from None
    except subprocess.CalledProcessError as error:
        raise ActionError(f"gh api {path}: {last_line(error.stderr)}") from None


def last_line(text: bytes) -> str:
    """The last line that says something."""
    lines = text.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")


def variable(name: str) -> str:
    """A variable of the environment that Actions sets."""
    try:
        return os.environ[name]
    except KeyError:
        raise ActionError(f"{name} is not set") from None


def output(name: str, value: str) -> None:
    """Set an output of the step."""
    if "\n" in value:
        raise ActionError(f"output {name} has a line break")
    with Path(variable("GITHUB_OUTPUT")).open("a") as file:
        file.write(f"{name}={value}\n")


def log_url() -> str:
    """The page of this run of the workflow."""
    server, repository = variable("GITHUB_SERVER_URL"), variable("GITHUB_REPOSITORY")
    return f"{server}/{repository}/actions/runs/{variable('GITHUB_RUN_ID')}"


def reply(number: int, text: str) -> None:
    """Comment under the pull request."""
    gh(f"repos/{variable('GITHUB_REPOSITORY')}/issues/{number}/comments", {"body": text})


def set_status(job: dict[str, Any], state: str, description: str) -> None:
    """A status on the commit; one context per request, so that requests do not hide each other."""
    gh(
        f"repos/{variable('GITHUB_REPOSITORY')}/statuses/{job['sha']}",
        {
            "state": state,
            "context": f"rerun-test: {job['what']} on {job['runner']}"[:200],
            "description": description[:140],
            "target_url": log_url(),
        },
    )


def head(number: int, created: str, expected: str | None) -> str:
    """The pull request's head commit, as it was when the comment was written.

    The author of a pull request from a fork could push other code between the comment and this
    job. Whoever pushes to this repository itself may run things on its runners anyway.
    """
    repository = variable("GITHUB_REPOSITORY")
    pull = gh(f"repos/{repository}/pulls/{number}")
    sha = str(pull["head"]["sha"])
    if not SHA.fullmatch(sha):
        raise ActionError(f"GitHub names no head commit of pull request {number}")
    if pull["state"] != "open":
        raise RefusedError("The pull request is closed.")
    if expected is not None:
        if expected != sha:
            raise RefusedError(f"The head is {sha}, not the commit that was named.")
        return sha
    source = pull["head"]["repo"]
    if source is not None and source["full_name"] == repository:
        return sha
    name = f"Name the commit: `at {sha}`."
    try:
        branch = quote(f"refs/heads/{pull['head']['ref']}", safe="")
        where = quote(source["full_name"]) if source else ""
        newest = gh(f"repos/{where}/activity?per_page=1&ref={branch}")[0]
        pushed, after = moment(newest["timestamp"]), newest["after"]
    except (ActionError, LookupError, TypeError, ValueError):
        raise RefusedError(f"GitHub does not say when the head was pushed. {name}") from None
    if after != sha or pushed >= moment(created):
        raise RefusedError(f"The branch was pushed to after the comment. {name}")
    return sha


def moment(text: str) -> datetime:
    """A time as GitHub writes it."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def command_parse() -> int:
    """Read the comment, settle commit, tests and runner, and reply."""
    try:
        event = json.loads(Path(variable("GITHUB_EVENT_PATH")).read_bytes())
        comment, number = event["comment"], int(event["issue"]["number"])
        body, created = str(comment["body"]), str(comment["created_at"])
        author, is_pull = comment["author_association"], "pull_request" in event["issue"]
    except OSError as error:
        raise ActionError(f"GITHUB_EVENT_PATH: {error.strerror}") from None
    except (LookupError, TypeError, ValueError) as error:
        raise ActionError(f"GITHUB_EVENT_PATH is no comment's event: {error!r}") from None
    # No reply: else a stranger could have us write as often as he likes.
    if author not in TRUSTED or not is_pull:
        print("rerun.py: not a comment by an owner, member or collaborator on a pull request")
        return 0
    labels = f"{os.environ.get('GPU_RUNNER', '')} {os.environ.get('RERUN_RUNNERS', '')}".split()
    for label in labels:
        if not LABEL.fullmatch(label):
            raise ActionError(
                f"GPU_RUNNER or RERUN_RUNNERS has {label!r}, which is no runner label"
            )
    gpu = list(dict.fromkeys(labels))
    try:
        request = read(body)
        if request is None:
            return 0
        sha = head(number, created, request.commit)
        here = Path.cwd()
        # For a private repository: the token stays out of git's configuration and of the command.
        helper = "credential.helper=!gh auth git-credential"
        options = ("--quiet", "--no-tags", "--depth=1", "--no-recurse-submodules")
        git(here, "-c", helper, "fetch", *options, "origin", sha)
        ids = tests(request.words, Commit(here, sha))
        label = runner(request.runner, ids, gpu)
    except RefusedError as refused:
        reply(number, f"Nothing is run. {refused}\n\n{usage(gpu)}")
        print(f"rerun.py: refused: {refused}")
        return 0
    job = {
        "number": number,
        "sha": sha,
        "runner": label,
        "what": " ".join(request.words),
        "tests": ids,
    }
    set_status(job, "pending", f"{len(ids)} to run")
    reply(number, f"Running `{job['what']}` at {sha} on `{label}`: [log]({log_url()}).")
    output("runner", label)
    output("sha", sha)
    output("job", json.dumps(job))
    return 0


def load_job() -> dict[str, Any]:
    """The job that ``parse`` wrote."""
    job: dict[str, Any] = json.loads(variable("RERUN_JOB"))
    for name in job["tests"]:
        file, colons, names = str(name).partition("::")
        plain = FILE.fullmatch(file) and file.startswith(ROOT)
        if not plain or (colons and not NAMES.fullmatch(names)):
            raise ActionError(f"{name!r} is no test id")
    if not job["tests"] or not SHA.fullmatch(job["sha"]):
        raise ActionError("RERUN_JOB names no tests or no commit")
    return job


def command_run(python: str) -> int:
    """Run the tests in the checkout of the pull request that is the working directory."""
    job = load_job()
    commit = git(Path.cwd(), "rev-parse", "HEAD").decode().strip()
    if commit != job["sha"]:
        raise ActionError(f"the checkout is at {commit}, not at {job['sha']}")
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.xml"
        command = [python, "-m", "pytest", "-v", f"--junitxml={record}", *job["tests"]]
        print(json.dumps(command), flush=True)
        try:
            code = subprocess.run(command).returncode
        except OSError as error:
            raise ActionError(f"{python} does not start: {error.strerror}") from None
        if not record.exists():
            return code or 1
        suite = ElementTree.parse(record).getroot().find("testsuite")
    if suite is None:
        return code or 1
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    output("counts", f"{total - skipped - failed} passed, {failed} failed, {skipped} skipped")
    # A runner without a GPU skips everything, which must not look like a pass.
    if code == 0 and skipped == total:
        print(f"rerun.py: nothing ran: {skipped} skipped", file=sys.stderr)
        return 1
    return code


def command_report() -> int:
    """Write the outcome under the pull request and on the commit."""
    job = load_job()
    result, counts = variable("RERUN_RESULT"), os.environ.get("RERUN_COUNTS", "")
    state = result if result in ("success", "failure") else "error"
    said = {"success": "passed", "failure": "failed"}.get(result, f"did not finish ({result})")
    # The pull request's code could have written this output.
    if re.fullmatch(r"\d{1,6} passed, \d{1,6} failed, \d{1,6} skipped", counts, re.ASCII):
        said += f": {counts}"
    set_status(job, state, said)
    where = f"`{job['what']}` at {job['sha']} on `{job['runner']}`"
    reply(int(job["number"]), f"{where} {said}. [Log]({log_url()})")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a failure is one line."""
    parser = argparse.ArgumentParser(prog="rerun.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("parse", help="comment to job (GITHUB_EVENT_PATH)")
    run = commands.add_parser("run", help="run the job (RERUN_JOB) with pytest")
    run.add_argument("--python", default=sys.executable, help="the interpreter with pytest")
    commands.add_parser("report", help="answer with the outcome (RERUN_RESULT)")
    options = parser.parse_args(arguments)
    try:
        if options.command == "run":
            return command_run(options.python)
        return {"parse": command_parse, "report": command_report}[options.command]()
    except ActionError as failed:
        print(f"rerun.py: {failed}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

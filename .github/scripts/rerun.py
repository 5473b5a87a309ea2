"""``/rerun-test``: run the tests that a comment on a pull request names, and answer it.

Each job of rerun-test.yml calls one command. ``parse`` reads the comment and decides on commit,
tests and runner. ``run`` runs the tests. ``report`` answers. Jobs whose token can write run this
file from the default branch with nothing installed, so it needs only the standard library.
"""

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
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import github_api as github
from github_api import ActionError

COMMAND = "/rerun-test"
TRUSTED = ("OWNER", "MEMBER", "COLLABORATOR")
HOSTED = "ubuntu-latest"
SHORT_NAMES = {
    "captures": "test_inkling_refresh_capture.py",
    "mtp": "test_inkling_mtp.py",
    "prefill": "test_inkling_prefill_graph.py",
    "soak": "test_inkling_soak.py",
}
REGISTERED, NEEDS_GPU = "test/registered/", ("test/registered/", "test/gpu/")
MAX_COMMENT, MAX_WORDS, MAX_TESTS, MAX_FILE = 1000, 20, 100, 1_000_000

PLAIN = re.compile(r"[A-Za-z0-9_./: -]+")
SHA = re.compile(r"[0-9a-f]{40}")
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
SUITE = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")
# No part of a path starts with a dot or a dash, which excludes `..` and options.
FILE = re.compile(r"(?:test/(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)*)?test_[A-Za-z0-9_]+\.py")
NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:::[A-Za-z_][A-Za-z0-9_]*)?")
# A registration with one of SGLang's CIs, and the order of its arguments.
CALL, POSITIONAL = re.compile(r"register_\w+_ci"), ("est_time", "suite", "nightly", "disabled")
SYMLINK = "120000"


class RefusedError(Exception):
    """The comment must not run anything. The message goes into the reply."""


@dataclass(frozen=True)
class Request:
    """What a comment asks for."""

    words: tuple[str, ...]
    runner: str | None = None
    commit: str | None = None


@dataclass(frozen=True)
class Job:
    """What to run, as ``parse`` decided and the other jobs read it."""

    number: int
    sha: str
    runner: str
    what: str
    tests: list[str]


def read_request(body: str) -> Request | None:
    """Read ``/rerun-test WHAT... [on RUNNER] [at COMMIT]``; return None for other comments."""
    if body.split(maxsplit=1)[:1] != [COMMAND] or not body.startswith(COMMAND):
        return None
    if len(body) > MAX_COMMENT:
        raise RefusedError(f"The comment has {len(body)} characters; {MAX_COMMENT} are allowed.")
    body = body.rstrip()
    # The reply repeats words of the comment only after this check.
    if not PLAIN.fullmatch(body):
        raise RefusedError("Use one line of ASCII letters, digits, spaces and `_` `.` `/` `:` `-`.")
    words = [word for word in body.split(" ")[1:] if word]
    options: dict[str, str] = {}
    while len(words) >= 2 and words[-2] in ("on", "at") and words[-2] not in options:
        options[words[-2]] = words[-1]
        words = words[:-2]
    if not words:
        raise RefusedError("The comment names no test.")
    if len(words) > MAX_WORDS:
        raise RefusedError(f"The comment has {len(words)} words; {MAX_WORDS} are allowed.")
    for word in ("on", "at"):
        if word in words:
            raise RefusedError(f"`{word}` takes one word, comes after the tests, and only once.")
    return Request(tuple(words), options.get("on"), options.get("at"))


class Commit:
    """The files under ``test/`` in a commit, read from git's objects without a checkout."""

    def __init__(self, sha: str):
        self.sha = sha
        self.modes: dict[str, str] = {}
        listing = run_git("ls-tree", "-r", "-z", "--full-tree", sha, "test")
        for entry in listing.split(b"\0")[:-1]:
            meta, _, path = entry.partition(b"\t")
            self.modes[os.fsdecode(path)] = meta.split()[0].decode()

    def read_text(self, path: str) -> str:
        """Return the text of a file."""
        return run_git("cat-file", "blob", f"{self.sha}:{path}").decode(errors="replace")

    def find_file(self, path: str) -> str:
        """Return the path of a regular test file under ``test/``, given its path or bare name."""
        if not FILE.fullmatch(path):
            raise RefusedError(f"`{path}` is not a test file: `test_*.py` under `test/`.")
        if "/" not in path:
            found = [name for name in self.modes if name.rpartition("/")[2] == path]
            if len(found) > 1:
                raise RefusedError(f"{len(found)} files are named `{path}`; give the path.")
            path = found[0] if found else path
        parts = (path, *map(str, PurePosixPath(path).parents))
        if any(self.modes.get(part) == SYMLINK for part in parts):
            raise RefusedError(f"`{path}` is a symbolic link, or is reached through one.")
        if path not in self.modes:
            raise RefusedError(f"There is no `{path}` at {self.sha[:12]}.")
        return path

    def find_suites(self) -> dict[str, list[str]]:
        """Return the test files of each suite that a registered file is enabled for."""
        found: dict[str, list[str]] = {}
        for path, mode in self.modes.items():
            if path.startswith(REGISTERED) and FILE.fullmatch(path) and mode != SYMLINK:
                for suite in sorted(read_suites(self.read_text(path))):
                    found.setdefault(suite, []).append(path)
        return found


def read_suites(text: str) -> set[str]:
    """Return the suites that a file registers for, as SGLang's parser ``sglang.test.ci`` does."""
    found = set()
    for statement in parse_python(text).body:
        match statement:
            case ast.Expr(ast.Call(ast.Name(name), arguments, keywords)) if CALL.fullmatch(name):
                named = [(keyword.arg, keyword.value) for keyword in keywords]
            case _:
                continue
        nodes = [*zip(POSITIONAL, arguments, strict=False), *named]
        values = {key: node.value for key, node in nodes if isinstance(node, ast.Constant)}
        suite, stage, config = (values.get(n) for n in ("suite", "stage", "runner_config"))
        if isinstance(stage, str) and isinstance(config, str):
            suite = f"{stage}-test-{config}"
        # Replies list the suites, and a pull request can register any string.
        if values.get("disabled") is None and isinstance(suite, str) and SUITE.fullmatch(suite):
            found.add(suite)
    return found


def parse_python(text: str) -> ast.Module:
    """Return the syntax tree of an untrusted file; an empty one if Python cannot parse it."""
    try:
        if len(text) <= MAX_FILE:
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return ast.Module(body=[], type_ignores=[])


def resolve_tests(words: Iterable[str], commit: Commit) -> list[str]:
    """Return the pytest ids that ``words`` name, each once, in the order given."""
    found: dict[str, None] = {}
    suites: dict[str, list[str]] | None = None
    for word in words:
        word = SHORT_NAMES.get(word, word)
        file, colons, names = word.partition("::")
        if file.endswith(".py"):
            path = commit.find_file(file)
            if colons:
                check_names(path, names, commit)
            found[path + colons + names] = None
            continue
        suites = commit.find_suites() if suites is None else suites
        if word not in suites:
            known = f"Suites at {commit.sha[:12]}: {list_words(sorted(suites)[:20]) or 'none'}."
            raise RefusedError(f"`{word}` is neither a test file nor a suite. {known}")
        found.update(dict.fromkeys(suites[word]))
    if len(found) > MAX_TESTS:
        raise RefusedError(f"These are {len(found)} files; {MAX_TESTS} are allowed.")
    return list(found)


def check_names(path: str, names: str, commit: Commit) -> None:
    """Refuse ``names`` unless they look like ``Class::test`` and the file defines the first."""
    if not NAMES.fullmatch(names):
        raise RefusedError(f"`{path}::{names}`: write `::Class`, `::Class::test` or `::test`.")
    first = names.partition("::")[0]
    defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = ast.walk(parse_python(commit.read_text(path)))
    if not any(isinstance(node, defined) and node.name == first for node in nodes):
        raise RefusedError(f"`{path}` has no `{first}` at {commit.sha[:12]}.")


def read_gpu_labels() -> list[str]:
    """Return the labels of the repository's own runners; the first is the default."""
    labels = f"{os.environ.get('GPU_RUNNER', '')} {os.environ.get('RERUN_RUNNERS', '')}".split()
    for label in labels:
        if not LABEL.fullmatch(label):
            raise ActionError(f"GPU_RUNNER or RERUN_RUNNERS has {label!r}: not a runner label")
    return list(dict.fromkeys(labels))


def choose_runner(asked: str | None, ids: Iterable[str], gpu: Sequence[str]) -> str:
    """Return the label ``asked`` for if it is allowed; without one, what the tests need."""
    if asked is not None:
        if asked not in (HOSTED, *gpu):
            raise RefusedError(f"`{asked}` is not a runner of this repository.")
        return asked
    if not any(name.startswith(NEEDS_GPU) for name in ids):
        return HOSTED
    if not gpu:
        raise RefusedError("These tests need a GPU: set the repository variable `GPU_RUNNER`.")
    return gpu[0]


def describe_usage(gpu: Sequence[str]) -> str:
    """Return the part of a refusal that says what is allowed."""
    return f"""\
Allowed: `{COMMAND} WHAT... [on RUNNER] [at COMMIT]`, on one line.
- WHAT: a test file under `test/` by path or bare name (`test_inkling_mtp.py`), `FILE::Class`, \
`FILE::Class::test`, a suite (`base-b-test-1-gpu-large`), or {list_words(SHORT_NAMES)}
- RUNNER: {list_words((HOSTED, *gpu))}
- COMMIT: the pull request's head, all 40 digits"""


def list_words(words: Iterable[str]) -> str:
    """Return ``words`` as code, separated by commas."""
    return ", ".join(f"`{word}`" for word in words)


def run_git(*arguments: str) -> bytes:
    """Return what git prints in the working directory."""
    return github.run_tool(["git", *arguments])


def send_reply(number: int, text: str) -> None:
    """Comment on the pull request."""
    github.call_api(f"{github.get_repository()}/issues/{number}/comments", {"body": text})


def set_status(job: Job, state: str, description: str) -> None:
    """Set a status on the commit. Each request has its own context, so none hides another."""
    github.call_api(
        f"{github.get_repository()}/statuses/{job.sha}",
        {
            "state": state,
            "context": f"rerun-test: {job.what} on {job.runner}"[:200],
            "description": description[:140],
            "target_url": github.get_log_url(),
        },
    )


def find_head(number: int, created: str, expected: str | None) -> str:
    """Return the pull request's head commit, as it was when the comment was written.

    The author of a pull request from a fork can push other code between the comment and this job.
    Whoever can push to this repository can run code on its runners anyway.
    """
    repository = github.get_repository()
    pull = github.call_api(f"{repository}/pulls/{number}")
    sha = str(pull["head"]["sha"])
    if not SHA.fullmatch(sha):
        raise ActionError(f"GitHub names no head commit of pull request {number}")
    if pull["state"] != "open":
        raise RefusedError("The pull request is closed.")
    if expected is not None:
        if expected != sha:
            raise RefusedError(f"The head is {sha}, not the commit that the comment names.")
        return sha
    source = pull["head"]["repo"]
    if source is not None and f"repos/{source['full_name']}" == repository:
        return sha
    advice = f"Name the commit: `at {sha}`."
    try:
        branch = quote(f"refs/heads/{pull['head']['ref']}", safe="")
        fork = quote(source["full_name"]) if source else ""
        newest = github.call_api(f"repos/{fork}/activity?per_page=1&ref={branch}")[0]
        pushed, after = datetime.fromisoformat(newest["timestamp"]), newest["after"]
    except (ActionError, LookupError, TypeError, ValueError):
        raise RefusedError(f"GitHub does not say when the head was pushed. {advice}") from None
    if after != sha or pushed >= datetime.fromisoformat(created):
        raise RefusedError(f"The branch was pushed to after the comment. {advice}")
    return sha


def read_event() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the comment and the issue of the event that started the workflow."""
    try:
        event = json.loads(Path(github.read_variable("GITHUB_EVENT_PATH")).read_bytes())
        return event["comment"], event["issue"]
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ActionError(f"GITHUB_EVENT_PATH is not the event of a comment: {error}") from None


def parse_comment() -> int:
    """Read the comment, decide on commit, tests and runner, and reply."""
    comment, issue = read_event()
    number = int(issue["number"])
    # A reply to everyone would let strangers make us write at will.
    if comment["author_association"] not in TRUSTED or "pull_request" not in issue:
        print("rerun.py: not a comment by an owner, member or collaborator on a pull request")
        return 0
    gpu = read_gpu_labels()
    try:
        request = read_request(comment["body"])
        if request is None:
            return 0
        sha = find_head(number, comment["created_at"], request.commit)
        # In a private repository git needs the token. This keeps it out of git's configuration
        # and of the command line.
        helper = "credential.helper=!gh auth git-credential"
        options = ("--quiet", "--no-tags", "--depth=1", "--no-recurse-submodules")
        run_git("-c", helper, "fetch", *options, "origin", sha)
        ids = resolve_tests(request.words, Commit(sha))
        runner = choose_runner(request.runner, ids, gpu)
    except RefusedError as refusal:
        send_reply(number, f"No test was started. {refusal}\n\n{describe_usage(gpu)}")
        print(f"rerun.py: refused: {refusal}")
        return 0
    job = Job(number, sha, runner, " ".join(request.words), ids)
    set_status(job, "pending", f"{len(ids)} to run")
    link = f"[log]({github.get_log_url()})"
    send_reply(job.number, f"Running `{job.what}` at {sha} on `{runner}`: {link}.")
    github.write_output("runner", runner)
    github.write_output("sha", sha)
    github.write_output("job", json.dumps(asdict(job)))
    return 0


def read_job() -> Job:
    """Return the job that ``parse`` wrote, checked again."""
    job = Job(**json.loads(github.read_variable("RERUN_JOB")))
    for test in job.tests:
        file, colons, names = str(test).partition("::")
        is_path = "/" in file and FILE.fullmatch(file)
        if not is_path or (colons and not NAMES.fullmatch(names)):
            raise ActionError(f"{test!r} is not a test id")
    if not job.tests or not SHA.fullmatch(job.sha):
        raise ActionError("RERUN_JOB names no tests or no commit")
    return job


def run_tests() -> int:
    """Run the tests with this Python in the working directory, a checkout of the pull request."""
    job = read_job()
    commit = run_git("rev-parse", "HEAD").decode().strip()
    if commit != job.sha:
        raise ActionError(f"the checkout is at {commit}, not at {job.sha}")
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.xml"
        command = [sys.executable, "-m", "pytest", "-v", f"--junitxml={record}", *job.tests]
        print(json.dumps(command), flush=True)
        code = subprocess.run(command).returncode
        suite = ElementTree.parse(record).getroot().find("testsuite") if record.exists() else None
    if suite is None:
        return code or 1
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    passed = total - skipped - failed
    github.write_output("counts", f"{passed} passed, {failed} failed, {skipped} skipped")
    # On a runner without a GPU every test skips. That must not look like a pass.
    if code == 0 and skipped == total:
        print(f"rerun.py: no test ran: {skipped} skipped", file=sys.stderr)
        return 1
    return code


def report_outcome() -> int:
    """Write the outcome on the pull request and as a status of the commit."""
    job = read_job()
    result, counts = github.read_variable("RERUN_RESULT"), os.environ.get("RERUN_COUNTS", "")
    state = result if result in ("success", "failure") else "error"
    outcome = {"success": "passed", "failure": "failed"}.get(result, f"did not finish ({result})")
    # The pull request's code can write this output too, so only plain counts get into the reply.
    if re.fullmatch(r"\d{1,6} passed, \d{1,6} failed, \d{1,6} skipped", counts, re.ASCII):
        outcome += f": {counts}"
    set_status(job, state, outcome)
    subject = f"`{job.what}` at {job.sha} on `{job.runner}`"
    send_reply(job.number, f"{subject} {outcome}. [Log]({github.get_log_url()})")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="rerun.py", description=__doc__)
    commands = {"parse": parse_comment, "run": run_tests, "report": report_outcome}
    parser.add_argument("command", choices=commands)
    return github.run_command("rerun.py", commands[parser.parse_args(arguments).command])


if __name__ == "__main__":
    sys.exit(main())

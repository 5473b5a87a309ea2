"""The workflows: who may start what, with which permissions, and what their steps do when run.

`make lint` checks their syntax, pinned actions, injection and stored credentials.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import actions
import pytest
import rerun
import yaml
from actions import REPOSITORY, GitHub, execute, load_workflow

READ = {"contents": "read"}
ANSWERS = {**READ, "pull-requests": "write", "statuses": "write"}
ISSUES = {**READ, "issues": "write"}
GPU = (
    "vars.GPU_RUNNER != '' && (github.event_name == 'push' || "
    "github.event.pull_request.head.repo.full_name == github.repository)"
)
COMMENT = (
    "github.event.issue.pull_request && "
    f"startsWith(github.event.comment.body, '{rerun.COMMAND}') && "
    f"contains(fromJSON('{json.dumps(rerun.TRUSTED)}'), github.event.comment.author_association)"
)
# Only these conditions read an event, so no step gets a text that a stranger wrote.
EXPECTED = {
    ("pr-test.yml", "cpu"): (READ, ""),
    ("pr-test.yml", "gpu"): (READ, GPU),
    ("publish.yml", "build"): (READ, ""),
    ("publish.yml", "publish"): ({"id-token": "write"}, ""),
    ("rerun-test.yml", "parse"): (ANSWERS, COMMENT),
    ("rerun-test.yml", "run"): (READ, "needs.parse.outputs.job != ''"),
    ("rerun-test.yml", "report"): (ANSWERS, "always() && needs.parse.outputs.job != ''"),
    ("upstream.yml", "watch"): (READ, ""),
    ("upstream.yml", "suite"): (READ, ""),
    ("upstream.yml", "report"): (ISSUES, "always() && needs.watch.outputs.watch != ''"),
}
# These jobs write with a token. They run the default branch's code only.
WITH_TOKEN = {key for key, (permissions, _) in EXPECTED.items() if permissions in (ANSWERS, ISSUES)}
FLOWS = {path.name: load_workflow(path.name) for path in sorted(actions.WORKFLOWS.iterdir())}
JOBS = {(name, key): job for name, flow in FLOWS.items() for key, job in flow["jobs"].items()}


def test_who_starts_what():
    assert FLOWS["rerun-test.yml"]["on"] == {"issue_comment": {"types": ["created"]}}
    assert FLOWS["publish.yml"]["on"] == {"push": {"tags": ["v*"]}}
    assert {"pull_request", "push"} == FLOWS["pr-test.yml"]["on"].keys()
    assert all(flow["permissions"] == {} for flow in FLOWS.values())
    assert JOBS.keys() == EXPECTED.keys()
    for key, (permissions, condition) in EXPECTED.items():
        assert JOBS[key]["permissions"] == permissions
        assert " ".join(JOBS[key].get("if", "").split()) == condition


@pytest.mark.parametrize("key", JOBS)
def test_a_job_that_runs_other_peoples_code_gets_no_token(key):
    dumped = yaml.safe_dump({**JOBS[key], "if": ""})
    assert "github.event" not in dumped and "timeout-minutes" in dumped
    # A comment's job could write the default branch's cache with a pull request's code.
    assert "cache" not in dumped
    tokens = set(re.findall(r"secrets\b|github\.token|GH_TOKEN|toJSON", dumped))
    assert tokens == ({"github.token", "GH_TOKEN"} if key in WITH_TOKEN else set())
    if key in WITH_TOKEN:
        assert not any("ref" in step.get("with", {}) for step in JOBS[key]["steps"])


def test_who_may_publish():
    publish = JOBS["publish.yml", "publish"]
    assert publish["environment"] == "release" and publish["needs"] == "build"
    assert not any("run" in step or "checkout" in step["uses"] for step in publish["steps"])


# -------------------------------------------------------------------------------- what they do


def find_step(name: str, key: str) -> dict:
    return [step for step in JOBS[name, key]["steps"] if "run" in step][-1]


@pytest.fixture
def github(tmp_path: Path) -> GitHub:
    """A repository with the project's scripts, and a pull request that adds a test."""
    scripts = (actions.ROOT / ".github/scripts").glob("*.py")
    hub = GitHub(tmp_path, {f".github/scripts/{path.name}": path.read_text() for path in scripts})
    tests = "class TestIt:\n    def test_one(self): pass\n\n    def test_two(self): assert 0\n"
    hub.open_pull({"test/unit/test_new.py": tests})
    return hub


def run_step(
    github: GitHub, name: str, key: str, folder: Path | None = None, **values: str
) -> subprocess.CompletedProcess[str]:
    """Run the last step of a job; ``values`` are the outputs of the jobs before it."""
    known = {
        "github.token": "a token",
        "vars.GPU_RUNNER": "1-gpu-h100",
        "vars.RERUN_RUNNERS": "4-gpu-b200",
        **{f"needs.{path.replace('_', '.')}": value for path, value in values.items()},
    }
    step = find_step(name, key)
    return execute(step, folder or github.base, github.make_environment(), known)


@pytest.mark.parametrize("sglang", JOBS["upstream.yml", "suite"]["strategy"]["matrix"]["sglang"])
def test_what_the_steps_make_is_in_the_makefile(sglang):
    scripts = [step.get("run", "") for job in JOBS.values() for step in job["steps"]]
    text = "\n".join([*scripts, (actions.ROOT / ".ci/run").read_text()])
    targets = {word for line in re.findall(r"\bmake (.+)", text) for word in line.split()}
    assert targets >= {"test", "gpu-test", ".venv/ready", "releases"}
    assert find_step("upstream.yml", "suite")["env"] == {"SGLANG": "${{ matrix.sglang }}"}
    command, variables = ["make", "-n", "-B", *targets], {**os.environ, "SGLANG": sglang}
    shown = subprocess.check_output(command, cwd=actions.ROOT, env=variables, text=True)
    assert f'install --progress-bar on "{sglang}" -e' in shown


def test_from_a_comment_to_its_answer(github, tmp_path):
    github.write_event("/rerun-test test_new.py")
    done = run_step(github, "rerun-test.yml", "parse")
    assert done.returncode == 0, done.stderr
    outputs = {f"parse_outputs_{name}": value for name, value in github.outputs.items()}
    declared = JOBS["rerun-test.yml", "parse"]["outputs"]
    assert declared == {name: f"${{{{ steps.parse.outputs.{name} }}}}" for name in github.outputs}
    assert github.statuses == [(github.head, "pending")]

    base, head = [step["with"] for step in JOBS["rerun-test.yml", "run"]["steps"][:2]]
    assert base["path"] == "base" and "ref" not in base
    assert head["ref"] == "${{ needs.parse.outputs.sha }}"
    actions.git(tmp_path, "clone", "-q", str(github.origin), head["path"])
    actions.git(tmp_path / "head", "checkout", "-q", outputs["parse_outputs_sha"])
    python = f'exec "{sys.executable}" "$@"\n'
    actions.write_program(tmp_path / "head/.venv/bin/python", python, "/bin/sh")
    done = run_step(github, "rerun-test.yml", "run", tmp_path, **outputs)
    assert done.returncode == 1 and "test_two" in done.stdout, done.stdout + done.stderr

    outputs |= {"run_result": "failure", "run_outputs_counts": github.outputs["counts"]}
    done = run_step(github, "rerun-test.yml", "report", **outputs)
    assert done.returncode == 0, done.stderr
    assert github.statuses == [(github.head, "failure")]
    assert "failed: 1 passed, 1 failed, 0 skipped" in github.replies[-1]


def test_a_refused_comment_starts_no_job(github):
    github.write_event("/rerun-test $(touch pwned) `id`")
    assert run_step(github, "rerun-test.yml", "parse").returncode == 0
    assert len(github.replies) == 1 and "Allowed:" in github.replies[0] and github.outputs == {}
    assert not (github.base / "pwned").exists()


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_watch_reaches_the_report(github, code):
    answer = {"title": "SGLang 9 is unknown", "body": "x\ny", "new": True}
    said = json.dumps(answer) if code < 2 else ""
    stub = f'test "$*" = "watch --json" && printf %s \'{said}\'; exit {code}\n'
    actions.write_program(github.base / ".venv/bin/inkling-sconv", stub, "/bin/sh")
    done = run_step(github, "upstream.yml", "watch")
    if code == 2:
        assert done.returncode != 0 and github.outputs == {}
        return
    outputs = {"watch_outputs_watch": github.outputs["watch"], "suite_result": "failure"}
    issues = f"repos/{REPOSITORY}/issues"
    github.answers[f"{issues}?state=all&per_page=100"] = [[]]
    assert run_step(github, "upstream.yml", "report", **outputs).returncode == 0
    verb, path, data = github.calls[-1]
    assert (verb, path, data["title"]) == ("POST", issues, answer["title"])
    assert "x\ny" in data["body"] and "suite on this release: failure" in data["body"]

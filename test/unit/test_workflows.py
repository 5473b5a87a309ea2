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
import upstream
import yaml
from actions import REPOSITORY, GitHub, evaluate, execute, load_workflow
from inkling_sconv import cli
from typer.testing import CliRunner

FORK_WORKFLOW = "python/inkling_sconv/fork_ci/inkling-sconv.yml"

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
    "github.event.comment.user.type == 'User' && "
    f"contains(fromJSON('{json.dumps(rerun.KNOWN)}'), github.event.comment.author_association)"
)
# Only these conditions read an event, and the name of a group has the number of its pull request.
# So no step gets a text that a stranger wrote.
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
    dumped = yaml.safe_dump({**JOBS[key], "if": "", "concurrency": ""})
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


def find_steps(name: str, key: str) -> list[dict]:
    """The steps that run our scripts: the last, and those that run only if one before it fails."""
    steps = [step for step in JOBS[name, key]["steps"] if "run" in step]
    first = max(number for number, step in enumerate(steps) if "if" not in step)
    assert all(step["if"] == "failure()" for step in steps[first + 1 :])
    return steps[first:]


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
    """Run the last steps of a job; ``values`` are the outputs of the jobs before it."""
    known = {
        "github.token": "a token",
        "vars.GPU_RUNNER": "1-gpu-h100",
        "vars.RERUN_RUNNERS": "4-gpu-b200",
        **{f"needs.{path.replace('_', '.')}": value for path, value in values.items()},
    }
    counts = known.get("needs.run.outputs.counts")
    known["needs.run.outputs.counts && 'unreadable'"] = "unreadable" if counts else ""
    environment = github.make_environment()
    for step in find_steps(name, key):
        done = execute(step, folder or github.base, environment, known)
        if done.returncode == 0:
            break
    return done


@pytest.mark.parametrize("sglang", JOBS["upstream.yml", "suite"]["strategy"]["matrix"]["sglang"])
def test_what_the_steps_make_is_in_the_makefile(sglang):
    scripts = [step.get("run", "") for job in JOBS.values() for step in job["steps"]]
    text = "\n".join([*scripts, (actions.ROOT / ".ci/run").read_text()])
    targets = {word for line in re.findall(r"\bmake (.+)", text) for word in line.split()}
    assert targets >= {"test", "gpu-test", ".venv/ready", "releases"}
    (step,) = find_steps("upstream.yml", "suite")
    assert step["env"] == {"SGLANG": "${{ matrix.sglang }}"}
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


HOSTILE = ["$(touch pwned) `id`", "'; touch pwned; '", "--upload-pack=touch pwned", "x\n::error::x"]


@pytest.mark.parametrize("words", HOSTILE)
def test_a_refused_comment_starts_no_job(github, words):
    github.write_event(f"/rerun-test {words}")
    assert run_step(github, "rerun-test.yml", "parse").returncode == 0
    assert len(github.replies) == 1 and "Allowed:" in github.replies[0] and github.outputs == {}
    assert not (github.base / "pwned").exists()


def name_group(number: int, runner: str) -> str:
    values = {"github.event.issue.number": str(number), "needs.parse.outputs.runner": runner}
    return evaluate(JOBS["rerun-test.yml", "run"]["concurrency"]["group"], values)


def test_who_waits_for_whom():
    # GitHub keeps one waiting job a group, and cancels the one that waited before. A group of the
    # workflow would let anyone's comment do that to a request.
    assert "concurrency" not in FLOWS["rerun-test.yml"]
    limited = {key for key, job in JOBS.items() if "concurrency" in job}
    assert limited == {("rerun-test.yml", "run")}
    assert JOBS["rerun-test.yml", "run"]["concurrency"]["cancel-in-progress"] is False
    runs = [(7, "1-gpu-h100"), (7, "4-gpu-b200"), (8, "1-gpu-h100"), (71, "gpu"), (7, "1 on gpu")]
    groups = {name_group(*run) for run in runs}
    assert len(groups) == len(runs) and name_group(*runs[0]) in groups
    # A comment that is refused, or that `parse` skips, names no runner.
    assert not {name_group(number, "") for number, _ in runs} & groups


def start_job(github: GitHub) -> dict[str, str]:
    """Play a comment's ``parse``; return its outputs as ``run_step`` takes them."""
    github.write_event("/rerun-test test_new.py")
    run_step(github, "rerun-test.yml", "parse")
    return {f"parse_outputs_{name}": value for name, value in github.outputs.items()}


@pytest.mark.parametrize(
    ("result", "counts", "state"),
    [
        # GitHub dropped the job from the queue.
        ("cancelled", "", "error"),
        # The pull request's code wrote more than a variable can hold.
        ("failure", "9" * 200_000, "failure"),
        ("success", "9" * 200_000, "success"),
    ],
)
def test_no_status_stays_pending(github, result, counts, state):
    outputs = start_job(github)
    (pending,) = github.contexts
    outputs |= {"run_result": result, "run_outputs_counts": counts}
    assert run_step(github, "rerun-test.yml", "report", **outputs).returncode == 0
    assert github.statuses == [(github.head, state)] and github.contexts == [pending]


def test_a_parse_that_fails_on_the_way_ends_its_status(github):
    github.answers[reply := f"POST repos/{REPOSITORY}/issues/{actions.NUMBER}/comments"] = "locked"
    outputs = start_job(github)
    assert github.statuses == [(github.head, "pending")]
    del github.answers[reply]
    # `report` waits for both jobs, and needs neither to succeed.
    outputs |= {"run_result": "skipped", "run_outputs_counts": ""}
    assert JOBS["rerun-test.yml", "report"]["needs"] == ["parse", "run"]
    assert run_step(github, "rerun-test.yml", "report", **outputs).returncode == 0
    assert github.statuses == [(github.head, "error")]


@pytest.mark.parametrize(
    ("sound", "flawed", "finding"),
    [
        ("persist-credentials: false", "persist-credentials: true", "artipacked"),
        ("permissions: {}", "permissions: write-all", "excessive-permissions"),
        ('pip install "$PACKAGE"', "pip install ${{ github.head_ref }}", "template-injection"),
        ("@11bd71901bbe5b1630ceea73d27597364c9af683", "@v4", "unpinned-uses"),
    ],
)
def test_lint_audits_what_ci_init_installs(tmp_path, sound, flawed, finding):
    shown = subprocess.check_output(["make", "-n", "lint"], cwd=actions.ROOT, text=True)
    (line,) = (line for line in shown.splitlines() if "zizmor" in line)
    _, *command, folder, fork = line.split()
    assert (folder, fork) == (".github", FORK_WORKFLOW)
    (tmp_path / "python/sglang/srt").mkdir(parents=True)
    assert CliRunner().invoke(cli.app, ["ci-init", str(tmp_path)]).exit_code == 0
    file = tmp_path / ".github/workflows/inkling-sconv.yml"
    zizmor = [str(Path(sys.executable).with_name("zizmor")), *command, str(file)]
    assert subprocess.run(zizmor, capture_output=True).returncode == 0
    file.write_text(file.read_text().replace(sound, flawed))
    done = subprocess.run(zizmor, capture_output=True, text=True)
    assert done.returncode != 0 and f"[{finding}]" in done.stdout


@pytest.mark.parametrize(("code", "body"), [(0, "x\ny"), (1, "x\ny"), (1, "é|" * 100_000), (2, "")])
def test_the_watch_reaches_the_report(github, code, body):
    answer = {"title": "SGLang 9 is unknown", "body": body, "new": True, "releases": [body]}
    (github.folder / "said").write_text(json.dumps(answer) if code < 2 else "")
    stub = f'test "$*" = "watch --json" && cat "{github.folder / "said"}"; exit {code}\n'
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
    assert body[:5000] in data["body"] and "suite on this release: failure" in data["body"]
    assert (upstream.CUT in data["body"]) == (len(body) > 5000)

"""The workflows: what they may do, and each of their steps, executed in a temporary clone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import actions
import pytest
import rerun
import yaml
from actions import GitHub, execute, names, workflow

KNOWN_ACTIONS = {
    "actions/checkout@11bd71901bbe5b1630ceea73d27597364c9af683": "v4.2.2",
    "actions/setup-python@a26af69be951a213d495a4c3e4e4022e16d87065": "v5.6.0",
    "actions/upload-artifact@ea165f8d65b6e75b540449e92b4886f43607fa02": "v4.6.2",
    "actions/download-artifact@d3f86a106a0bac45b974a628896c90dbdf5c8093": "v4.3.0",
    "pypa/gh-action-pypi-publish@76f52bc884231f62b9a034ebfe128415bbaabdfc": "v1.12.4",
}
READ = {"contents": "read"}
ANSWERS = {**READ, "pull-requests": "write", "statuses": "write"}
PERMISSIONS = {
    ("pr-test.yml", "cpu"): READ,
    ("pr-test.yml", "gpu"): READ,
    ("publish.yml", "build"): READ,
    ("publish.yml", "publish"): {"id-token": "write"},
    ("rerun-test.yml", "parse"): ANSWERS,
    ("rerun-test.yml", "run"): READ,
    ("rerun-test.yml", "report"): ANSWERS,
    ("upstream.yml", "watch"): READ,
    ("upstream.yml", "suite"): READ,
    ("upstream.yml", "report"): {**READ, "issues": "write"},
}
# Whatever runs a pull request's code or SGLang's. The others run our default branch alone.
STRANGERS = {
    ("pr-test.yml", "cpu"),
    ("pr-test.yml", "gpu"),
    ("rerun-test.yml", "run"),
    ("upstream.yml", "watch"),
    ("upstream.yml", "suite"),
}
# No job of these holds a token that is named in the file.
TOKENLESS = {*STRANGERS, ("publish.yml", "build"), ("publish.yml", "publish")}
# test_release.py executes the steps of this one, with real tags.
ELSEWHERE = "publish.yml"
JOBS = [(name, job) for name in names() for job in workflow(name)["jobs"]]
STEPS = [
    (name, job, number)
    for name, job in JOBS
    for number, step in enumerate(workflow(name)["jobs"][job]["steps"])
    if "run" in step
]
NOTICE = "::notice::The GPU suites are skipped; the repository variable GPU_RUNNER is not set."
# Steps that start something long: what they start, and what they print.
LONG = {
    ".ci/run": (["make test"], ""),
    f'echo "{NOTICE}"': ([], NOTICE + "\n"),
    "make gpu-test": (["make gpu-test"], ""),
    "make test": (["make test"], ""),
    "make .venv/ready": (["make .venv/ready"], ""),
    "make .venv/ready releases": (["make .venv/ready releases"], ""),
}
PR_TEST = "test/unit/test_of_the_pull_request.py"


def job(name: str, key: str) -> dict:
    return workflow(name)["jobs"][key]


def step(name: str, key: str, number: int = -1) -> dict:
    return [step for step in job(name, key)["steps"] if "run" in step][number]


# ------------------------------------------------------------------------------- what they may


def test_zizmor_has_nothing_to_say():
    zizmor = Path(sys.executable).parent / "zizmor"
    command = [zizmor, "--offline", "--no-progress", "--format=json", actions.ROOT / ".github"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout) == [], done.stdout + done.stderr
    # The one exception is the trigger that /rerun-test cannot do without.
    ignored = [line for name in names() for line in text(name).splitlines() if "zizmor:" in line]
    assert ignored == ["on: # zizmor: ignore[dangerous-triggers]"]


def text(name: str) -> str:
    return (actions.WORKFLOWS / name).read_text()


@pytest.mark.parametrize("name", names())
def test_a_workflow_by_itself_may_nothing(name):
    flow = workflow(name)
    assert flow["permissions"] == {}
    assert not set(actions.triggers(flow)) & {"pull_request_target", "workflow_run"}
    assert all("timeout-minutes" in job for job in flow["jobs"].values())


@pytest.mark.parametrize(("name", "key"), JOBS)
def test_a_job_has_the_permissions_that_it_needs(name, key):
    assert job(name, key)["permissions"] == PERMISSIONS[name, key]


@pytest.mark.parametrize("name", names())
def test_actions_are_pinned(name):
    used = re.findall(r"\buses: *(\S+)(?: # (\S+))?$", text(name), re.MULTILINE)
    steps = [step for job in workflow(name)["jobs"].values() for step in job["steps"]]
    assert len(used) == sum("uses" in step for step in steps) > 0
    for action, version in used:
        assert KNOWN_ACTIONS[action] == version


@pytest.mark.parametrize(("name", "key"), JOBS)
def test_no_checkout_leaves_a_token(name, key):
    for used in job(name, key)["steps"]:
        if "uses" in used and used["uses"].startswith("actions/checkout"):
            assert used["with"]["persist-credentials"] is False


@pytest.mark.parametrize(("name", "key"), JOBS)
def test_no_cache(name, key):
    # What a comment starts could write the default branch's cache with a pull request's code.
    for used in job(name, key)["steps"]:
        assert "cache" not in yaml.safe_dump(used)


@pytest.mark.parametrize(("name", "key", "number"), STEPS)
def test_no_expression_is_part_of_a_script(name, key, number):
    assert "${{" not in job(name, key)["steps"][number]["run"]


@pytest.mark.parametrize(("name", "key"), JOBS)
def test_a_strangers_code_finds_no_secret(name, key):
    dumped = yaml.safe_dump({**job(name, key), "if": ""})
    found = re.findall(
        r"secrets\.|secrets\[|github\.token|GH_TOKEN|toJSON\((?:github|secrets)", dumped
    )
    assert not found if (name, key) in TOKENLESS else set(found) == {"github.token", "GH_TOKEN"}
    if (name, key) not in TOKENLESS:
        # The default branch: a ref would be somebody else's.
        refs = [used["with"].get("ref") for used in job(name, key)["steps"] if "uses" in used]
        assert refs == [None]


def test_no_text_of_an_event_gets_anywhere():
    for name in names():
        used = set(re.findall(r"github\.event\.[\w.]+", re.sub(r"#.*", "", text(name))))
        in_steps = "".join(
            yaml.safe_dump(job(name, key)["steps"]) for key in workflow(name)["jobs"]
        )
        assert "github.event" not in in_steps
        assert used <= {
            "github.event.issue.pull_request",
            "github.event.comment.body",
            "github.event.comment.author_association",
            "github.event.pull_request.head.repo.full_name",
        }


def test_the_workflow_and_the_script_trust_the_same_people():
    condition = job("rerun-test.yml", "parse")["if"]
    assert tuple(json.loads(re.search(r"fromJSON\('(.+?)'\)", condition)[1])) == rerun.TRUSTED
    assert f"startsWith(github.event.comment.body, '{rerun.COMMAND}')" in condition
    assert "github.event.issue.pull_request" in condition and "||" not in condition
    assert actions.triggers(workflow("rerun-test.yml")) == {"issue_comment": {"types": ["created"]}}


def test_a_fork_reaches_no_runner_of_ours_by_itself():
    condition = " ".join(job("pr-test.yml", "gpu")["if"].split())
    assert condition == (
        "vars.GPU_RUNNER != '' && (github.event_name == 'push' || "
        "github.event.pull_request.head.repo.full_name == github.repository)"
    )
    assert step("pr-test.yml", "cpu")["run"] == f'echo "{NOTICE}"'
    assert step("pr-test.yml", "cpu")["if"] == "vars.GPU_RUNNER == ''"


# -------------------------------------------------------------------------------- what they do


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> GitHub:
    """The project on GitHub, with a pull request that adds a test."""
    github = GitHub(tmp_path_factory.mktemp("workflows") / "hub")
    actions.copy_project(github.origin)
    github.commit()
    tests = "class TestIt:\n    def test_one(self): pass\n\n    def test_two(self): assert 0\n"
    actions.write(github.origin, {PR_TEST: tests})
    github.open_pull()
    actions.executable(github.bin / "make", 'echo "make $*" >> "$STARTED"\n', "/bin/sh")
    return github


@pytest.fixture
def github(shared: GitHub) -> GitHub:
    for record in (shared.fake / "calls", shared.folder / "started"):
        record.unlink(missing_ok=True)
    return shared


def environment(github: GitHub, **more: str) -> dict[str, str]:
    return github.environment(STARTED=str(github.folder / "started"), CI="true", **more)


def started(github: GitHub) -> list[str]:
    record = github.folder / "started"
    return record.read_text().splitlines() if record.exists() else []


def values(outputs: dict[str, str] | None = None, **more: str) -> dict[str, str]:
    """Values of the expressions in steps."""
    given = {f"needs.parse.outputs.{name}": value for name, value in (outputs or {}).items()}
    return {
        "github.token": "a token",
        "vars.GPU_RUNNER": "1-gpu-h100",
        "vars.RERUN_RUNNERS": "4-gpu-b200",
        "matrix.sglang": "sglang>=0.5.23rc0",
        **given,
        **more,
    }


def test_every_step_is_executed_here():
    short = {step for step in STEPS if long(*step) is None and step[0] != ELSEWHERE}
    assert {(name, key) for name, key, _ in short} == {
        ("rerun-test.yml", "parse"),
        ("rerun-test.yml", "run"),
        ("rerun-test.yml", "report"),
        ("upstream.yml", "watch"),
        ("upstream.yml", "report"),
    }
    assert len(short) == 5


def long(name: str, key: str, number: int) -> tuple[list[str], str] | None:
    return LONG.get(job(name, key)["steps"][number]["run"])


@pytest.mark.parametrize(("name", "key", "number"), [s for s in STEPS if long(*s) is not None])
def test_a_long_step_starts_what_it_says(github, name, key, number):
    place = github.folder / "work"
    place.mkdir(exist_ok=True)
    if not (place / "head").exists():
        (place / "head").symlink_to(github.base)
    folder = place if "working-directory" in job(name, key)["steps"][number] else github.base
    done = execute(job(name, key)["steps"][number], folder, environment(github), values())
    assert done.returncode == 0, done.stderr
    assert (started(github), done.stdout) == long(name, key, number)


TARGETS = sorted(
    {word for calls, _ in LONG.values() for call in calls for word in call.split()[1:]}
)


@pytest.mark.parametrize("target", TARGETS)
def test_the_makefile_has_the_target(target):
    assert (
        subprocess.run(["make", "-n", target], cwd=actions.ROOT, capture_output=True).returncode
        == 0
    )


def test_make_test_lints_the_workflows_and_their_scripts():
    done = subprocess.run(["make", "-n", "test"], cwd=actions.ROOT, capture_output=True, text=True)
    lines = [line.removeprefix(".venv/bin/") for line in done.stdout.splitlines()]
    assert {
        "zizmor --offline --quiet .github",
        "mypy .github/scripts",
        "mypy",
        "ruff check .",
    } <= set(lines)


def test_the_newest_candidate_is_what_make_installs():
    matrix = job("upstream.yml", "suite")["strategy"]["matrix"]["sglang"]
    assert step("upstream.yml", "suite")["env"] == {"SGLANG": "${{ matrix.sglang }}"}
    for requirement in matrix:
        done = subprocess.run(
            ["make", "-n", "-B", ".venv/ready"],
            cwd=actions.ROOT,
            env={**actions.os.environ, "SGLANG": requirement},
            capture_output=True,
            text=True,
        )
        assert f'install --progress-bar on "{requirement}" -e' in done.stdout


class Runner:
    """The three jobs of rerun-test.yml, each in the folders that its checkouts give it."""

    def __init__(self, github: GitHub, folder: Path):
        self.github, self.folder = github, folder

    def parse(self, comment: str, author: str = "MEMBER") -> dict[str, str]:
        self.github.event(comment, author)
        environ = environment(self.github)
        done = execute(step("rerun-test.yml", "parse"), self.github.base, environ, values())
        assert done.returncode == 0, done.stderr
        outputs = self.github.outputs()
        declared = job("rerun-test.yml", "parse")["outputs"]
        for name, source in declared.items():
            assert source == f"${{{{ steps.parse.outputs.{name} }}}}"
        assert set(outputs) in (set(), set(declared))
        return outputs

    def run(self, outputs: dict[str, str]) -> subprocess.CompletedProcess[str]:
        work = self.folder / "work"
        work.mkdir()
        checkouts = [s["with"] for s in job("rerun-test.yml", "run")["steps"][:2]]
        assert [c["path"] for c in checkouts] == ["base", "head"] and "ref" not in checkouts[0]
        (work / "base").symlink_to(self.github.base)
        actions.git(work, "clone", "-q", str(self.github.origin), "head")
        actions.git(work / "head", "fetch", "-q", "origin", f"refs/pull/{actions.NUMBER}/head")
        ref = actions.expand(checkouts[1]["ref"], values(outputs))
        actions.git(work / "head", "checkout", "-q", ref)
        python = f'exec "{sys.executable}" "$@"\n'
        actions.executable(work / "head/.venv/bin/python", python, "/bin/sh")
        return execute(
            step("rerun-test.yml", "run"), work, environment(self.github), values(outputs)
        )

    def report(self, outputs: dict[str, str], code: int) -> None:
        result = "failure" if code else "success"
        counts = self.github.outputs().get("counts", "")
        more = {"needs.run.result": result, "needs.run.outputs.counts": counts}
        given = values(outputs, **more)
        environ = environment(self.github)
        done = execute(step("rerun-test.yml", "report"), self.github.base, environ, given)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def runner(github: GitHub, tmp_path: Path) -> Runner:
    return Runner(github, tmp_path)


@pytest.mark.parametrize(
    ("names", "code", "said"),
    [
        ("::TestIt::test_one", 0, "passed: 1 passed, 0 failed, 0 skipped"),
        ("", 1, "failed: 1 passed, 1 failed, 0 skipped"),
    ],
)
def test_from_a_comment_to_its_answer(github, runner, names, code, said):
    outputs = runner.parse(f"/rerun-test test_of_the_pull_request.py{names}")
    assert (outputs["sha"], outputs["runner"]) == (github.head, "ubuntu-latest")
    done = runner.run(outputs)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("test_two" in done.stdout) is (names == "")
    runner.report(outputs, done.returncode)
    assert github.statuses() == [
        (github.head, "pending"),
        (github.head, "failure" if code else "success"),
    ]
    assert said in github.replies()[-1] and len(github.replies()) == 2


def test_a_gpu_suite_up_to_the_gpu(github, runner):
    outputs = runner.parse("/rerun-test captures on 4-gpu-b200")
    assert outputs["runner"] == "4-gpu-b200"
    done = runner.run(outputs)
    if done.returncode and "nothing ran" not in done.stderr:
        pytest.fail(done.stdout + done.stderr)
    if done.returncode:
        assert "needs a GPU" in done.stdout
        assert re.search(r"nothing ran: [1-9]\d* skipped", done.stderr)


def test_a_refused_comment_starts_no_job(github, runner):
    assert runner.parse("/rerun-test $(touch pwned) `id`") == {}
    assert runner.parse("/rerun-test mtp", author="NONE") == {}
    assert len(github.replies()) == 1 and "Allowed:" in github.replies()[0]
    assert not (github.base / "pwned").exists()
    needs = {key: job("rerun-test.yml", key)["if"] for key in ("run", "report")}
    assert needs == {
        "run": "needs.parse.outputs.job != ''",
        "report": "always() && needs.parse.outputs.job != ''",
    }


@pytest.mark.parametrize("code", [0, 1])
def test_the_watch_reaches_the_report(github, code):
    answer = {"title": "SGLang 9 is unknown", "body": "x\ny", "new": True}
    stub = (
        f'echo "inkling-sconv $*" >> "$STARTED"; printf %s \'{json.dumps(answer)}\'; exit {code}\n'
    )
    actions.executable(github.base / ".venv/bin/inkling-sconv", stub, "/bin/sh")
    done = execute(step("upstream.yml", "watch"), github.base, environment(github), values())
    assert done.returncode == 0, done.stderr
    assert started(github) == ["inkling-sconv watch --json"]
    outputs = github.outputs()
    issues = f"repos/{actions.REPOSITORY}/issues"
    github.answers[f"{issues}?state=all&per_page=100"] = [[]]
    more = {"needs.watch.outputs.watch": outputs["watch"], "needs.suite.result": "failure"}
    given = values(**more)
    report = step("upstream.yml", "report")
    done = execute(report, github.base, environment(github), given)
    assert done.returncode == 0, done.stderr
    ((path, data),) = github.calls()
    assert (path, data["title"]) == (issues, answer["title"])
    assert "x\ny" in data["body"] and "suite on this release: failure" in data["body"]


def test_a_watch_that_cannot_tell_fails_its_job(github):
    stub = "echo 'pip does not answer' >&2; exit 2\n"
    actions.executable(github.base / ".venv/bin/inkling-sconv", stub, "/bin/sh")
    done = execute(step("upstream.yml", "watch"), github.base, environment(github), values())
    assert done.returncode != 0 and github.outputs() == {}


def test_pre_commit_calls_the_projects_own_tools():
    config = yaml.safe_load((actions.ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    entries = [hook["entry"] for hook in config["repos"][0]["hooks"]]
    assert [entry.split()[0] for entry in entries] == [
        ".venv/bin/ruff",
        ".venv/bin/ruff",
        ".venv/bin/mypy",
        ".venv/bin/mypy",
        ".venv/bin/zizmor",
    ]

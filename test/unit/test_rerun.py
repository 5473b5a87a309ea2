"""``/rerun-test``: what a comment may run, at which commit, and what is answered."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import actions
import pytest
import rerun
from actions import AFTER, GitHub
from hypothesis import given, settings
from hypothesis import strategies as st

GPU, OTHER = "1-gpu-h100", "4-gpu-b200"
A, TWICE = "test/unit/test_a.py", "test_twice.py"
MTP, KL = "test/registered/inkling/test_inkling_mtp.py", "test/registered/kl/test_kl.py"
REGISTER = "register_cuda_ci(est_time=1, stage='base-b', runner_config='1-gpu-large')\n"
OUR_SUITE = "base-b-test-1-gpu-large"
FILES = {
    "secret.py": "",
    A: "class TestA:\n    def test_one(self): pass\n\n\ndef test_alone(): pass\n",
    MTP: REGISTER + "class TestMtp: pass\n",
    KL: REGISTER + "register_amd_ci(5, 'nightly-amd')\n",
    "test/registered/kl/test_off.py": REGISTER.replace("(", "(disabled='broken', ", 1),
    "test/registered/kl/test_hostile.py": "register_cuda_ci(1, suite='@all `x`')\n",
    "test/registered/kl/test_deep.py": "(" * 5000,
    "test/registered/kl/test_not_python.py": "def (:\n",
    f"test/unit/{TWICE}": "",
    f"test/gpu/{TWICE}": "",
    "test/unit/helper.py": "",
    "other/test_other.py": "",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> GitHub:
    github = GitHub(tmp_path_factory.mktemp("rerun") / "hub")
    actions.write(github.origin, {"README": "", "test/unit/test_on_main.py": ""})
    github.commit()
    (github.origin / "test/unit/test_on_main.py").unlink()
    actions.write(github.origin, FILES)
    (github.origin / "test/unit/test_link.py").symlink_to("../../secret.py")
    (github.origin / "test/registered/test_link_too.py").symlink_to("inkling/test_inkling_mtp.py")
    (github.origin / "test/linked").symlink_to("../other")
    github.open_pull()
    return github


@pytest.fixture
def github(shared: GitHub, monkeypatch: pytest.MonkeyPatch) -> GitHub:
    (shared.fake / "calls").unlink(missing_ok=True)
    monkeypatch.setattr(shared, "answers", json.loads(json.dumps(shared.answers)))
    return shared


@pytest.fixture
def parse(github: GitHub, monkeypatch: pytest.MonkeyPatch):
    """Give a comment's event to ``rerun.py parse`` on the runner; the job, or None."""

    def _parse(body: str, author: str = "MEMBER", runners: str = GPU, more: str = OTHER, **issue):
        github.event(body, author, **issue)
        variables = github.environment(GPU_RUNNER=runners, RERUN_RUNNERS=more)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(github.base)
        assert rerun.main(["parse"]) == 0
        outputs = github.outputs()
        if not outputs:
            return None
        job = json.loads(outputs["job"])
        assert (outputs["sha"], outputs["runner"]) == (job["sha"], job["runner"])
        return job

    return _parse


@pytest.mark.parametrize(
    ("words", "ids", "runner"),
    [
        (A, [A], "ubuntu-latest"),
        ("test_a.py", [A], "ubuntu-latest"),
        (f"{A}::TestA", [f"{A}::TestA"], "ubuntu-latest"),
        ("test_a.py::TestA::test_one", [f"{A}::TestA::test_one"], "ubuntu-latest"),
        ("test_a.py::test_alone", [f"{A}::test_alone"], "ubuntu-latest"),
        ("test_inkling_mtp.py", [MTP], GPU),
        ("mtp", [MTP], GPU),
        (OUR_SUITE, [MTP, KL], GPU),
        ("nightly-amd", [KL], GPU),
        (f"{OUR_SUITE} mtp test_a.py", [MTP, KL, A], GPU),
        (f"mtp on {OTHER}", [MTP], OTHER),
        ("mtp on ubuntu-latest", [MTP], "ubuntu-latest"),
        (f"test_a.py on {GPU}", [A], GPU),
        (f"  test_a.py   on   {GPU}  \r\n\n", [A], GPU),
        (f"test/unit/{TWICE}", [f"test/unit/{TWICE}"], "ubuntu-latest"),
    ],
)
def test_what_runs_is_what_was_named(github, parse, words, ids, runner):
    job = parse(f"/rerun-test {words}")
    assert (job["tests"], job["runner"], job["sha"]) == (ids, runner, github.head)
    assert github.statuses() == [(github.head, "pending")]
    (reply,) = github.replies()
    assert github.head in reply and f"`{runner}`" in reply and "/actions/runs/42" in reply


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "No test is named"),
        ("on 1-gpu-h100", "No test is named"),
        ("secret.py", "no test file"),
        ("other/test_other.py", "outside `test/`"),
        ("/etc/test_passwd.py", "no test file"),
        ("test/../other/test_other.py", "no test file"),
        ("../test_a.py", "no test file"),
        ("test/unit/../unit/test_a.py", "no test file"),
        ("test/./unit/test_a.py", "no test file"),
        ("test//unit/test_a.py", "no test file"),
        ("test/unit/helper.py", "no test file"),
        ("test/unit", "neither a test file nor a suite"),
        ("test/unit/test_link.py", "symbolic link"),
        ("test_link.py", "symbolic link"),
        ("test/linked/test_other.py", "symbolic link"),
        ("test/unit/test_on_main.py", "There is no `test/unit/test_on_main.py`"),
        ("test_absent.py", "There is no `test_absent.py`"),
        (TWICE, "2 files"),
        ("test_a.py::TestB", "has no `TestB`"),
        ("test_a.py::TestA::a::b", "takes `::Class`"),
        ("test_a.py::", "takes `::Class`"),
        ("no-such-suite", "neither a test file nor a suite"),
        ("-k", "neither a test file nor a suite"),
        ("--collect-only", "neither a test file nor a suite"),
        ("-p.py", "no test file"),
        ("--rootdir/test_a.py", "no test file"),
        ("test_a.py on h100", "not a runner"),
        ("test_a.py on self-hosted", "not a runner"),
        ("test_a.py on --x", "not a runner"),
        ("test_a.py on", "`on` takes one word"),
        ("test_a.py on 1-gpu-h100 4-gpu-b200", "`on` takes one word"),
        ("test_a.py on 1-gpu-h100 on 4-gpu-b200", "`on` takes one word"),
        (f"test_a.py at {'0' * 40}", "not the commit"),
        ("test_a.py at HEAD", "not the commit"),
        ("test_a.py --deselect=x", "ASCII"),
        ("test_a.py'", "ASCII"),
        ('"test_a.py"', "ASCII"),
        ("test_a.py; id", "ASCII"),
        ("test_a.py $(id)", "ASCII"),
        ("test_a.py `id`", "ASCII"),
        ("${{ github.token }}", "ASCII"),
        ("test_a.py\n/rerun-test mtp", "ASCII"),
        ("test_a.py\ttest_a.py", "ASCII"),
        ("test_a.py\0", "ASCII"),
        ("test_a.py 🚀", "ASCII"),
        ("test_\u0430.py", "ASCII"),
        ("test_a.py @octocat", "ASCII"),
        ("a" * 10_000, "1000 are allowed"),
        ("x " * 21, "20 are allowed"),
    ],
)
def test_what_is_refused_is_told_so(github, parse, words, reason):
    assert parse(f"/rerun-test {words}") is None
    (reply,) = github.replies()
    assert reason in reply and github.statuses() == []
    assert "Allowed: `/rerun-test WHAT... [on RUNNER] [at COMMIT]`" in reply
    assert f"`ubuntu-latest`, `{GPU}`, `{OTHER}`" in reply
    assert len(reply) < 2000
    for hostile in ("🚀", "$(", "${{", "@octocat", "@all", "; id", "aaaa"):
        assert hostile not in reply


def test_suites_are_those_of_the_pull_request(parse, github):
    assert parse("/rerun-test nothing") is None
    assert f"`{OUR_SUITE}`, `nightly-amd`." in github.replies()[0]


@pytest.mark.parametrize("author", ["NONE", "CONTRIBUTOR", "FIRST_TIME_CONTRIBUTOR", "", "member"])
def test_a_stranger_gets_neither_run_nor_reply(github, parse, author):
    assert parse("/rerun-test test_a.py", author) is None
    assert github.calls() == github.calls("GET") == []


@pytest.mark.parametrize("author", rerun.TRUSTED)
def test_the_trusted(parse, author):
    assert parse("/rerun-test test_a.py", author)["tests"] == [A]


@pytest.mark.parametrize(
    "body", ["", "hello", "/rerun-tests test_a.py", "see /rerun-test mtp", " /rerun-test mtp"]
)
def test_other_comments_are_left_alone(github, parse, body):
    assert parse(body) is None and github.calls() == []


def test_a_comment_on_an_issue_is_left_alone(github, shared, monkeypatch):
    github.event("/rerun-test mtp")
    event = json.loads((github.folder / "event.json").read_text())
    del event["issue"]["pull_request"]
    (github.folder / "event.json").write_text(json.dumps(event))
    for name, value in github.environment().items():
        monkeypatch.setenv(name, value)
    assert rerun.main(["parse"]) == 0 and github.calls() == []


def test_without_a_gpu_runner(github, parse):
    assert parse("/rerun-test mtp", runners="", more="") is None
    assert "`GPU_RUNNER`" in github.replies()[0]
    assert parse("/rerun-test test_a.py", runners="", more="")["runner"] == "ubuntu-latest"


def fork(github: GitHub, pushed: str, after: str | None = None) -> None:
    pull = github.answers[f"repos/{actions.REPOSITORY}/pulls/{actions.NUMBER}"]
    pull["head"]["repo"] = {"full_name": "eve/inkling"}
    path = "repos/eve/inkling/activity?per_page=1&ref=refs%2Fheads%2Fa%20branch"
    github.answers[path] = [{"timestamp": pushed, "after": after or github.head}]


def test_a_fork_that_was_pushed_before_the_comment(github, parse):
    fork(github, actions.BEFORE)
    assert parse("/rerun-test test_a.py")["sha"] == github.head


@pytest.mark.parametrize("pushed", [AFTER, actions.COMMENTED])
def test_a_fork_that_was_pushed_after_the_comment(github, parse, pushed):
    fork(github, pushed)
    assert parse("/rerun-test test_a.py") is None
    (reply,) = github.replies()
    assert "pushed to after the comment" in reply and f"at {github.head}" in reply
    assert parse(f"/rerun-test test_a.py at {github.head}")["sha"] == github.head


def test_a_fork_whose_pushes_are_not_told(github, parse):
    fork(github, actions.BEFORE)
    github.answers = {path: a for path, a in github.answers.items() if "activity" not in path}
    assert parse("/rerun-test test_a.py") is None
    assert "does not say when" in github.replies()[0]
    fork(github, actions.BEFORE, after="0" * 40)
    assert parse("/rerun-test test_a.py") is None


def test_a_closed_pull_request(github, parse):
    github.answers[f"repos/{actions.REPOSITORY}/pulls/{actions.NUMBER}"]["state"] = "closed"
    assert parse("/rerun-test test_a.py") is None
    assert "closed" in github.replies()[0]


@pytest.mark.parametrize(
    ("variables", "answers", "message"),
    [
        ({"GITHUB_EVENT_PATH": None}, True, "GITHUB_EVENT_PATH is not set"),
        ({"GPU_RUNNER": "a;b"}, True, "'a;b', which is no runner label"),
        ({}, False, "HTTP 404"),
        ({"GITHUB_EVENT_PATH": "/nowhere"}, True, "GITHUB_EVENT_PATH: No such file"),
        ({"GITHUB_EVENT_PATH": __file__}, True, "GITHUB_EVENT_PATH is no comment's event"),
    ],
)
def test_failures_are_one_line(github, monkeypatch, capsys, variables, answers, message):
    github.event("/rerun-test test_a.py")
    github.answers = github.answers if answers else {}
    monkeypatch.chdir(github.base)
    for name, value in {**github.environment(), **variables}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(
            name, value
        )
    assert rerun.main(["parse"]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("rerun.py: ")


def test_nothing_of_the_pull_request_is_checked_out(github, parse):
    parse("/rerun-test test_a.py")
    assert not (github.base / A).exists() and (github.base / "test/unit/test_on_main.py").exists()


PIECES = st.sampled_from(
    [
        *(" ", " ", "on", "at", "mtp", OUR_SUITE, "::", "TestA", "-", "'", "é", "\n", "\0"),
        *("test", "unit", "/", "..", ".", "linked", "other"),
        *("test_a.py", "test_link.py", "secret.py", "test_other.py"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(words=st.one_of(st.lists(PIECES, max_size=8).map("".join), st.text(max_size=30)))
def test_no_comment_reaches_beyond_the_test_files(shared, words):
    commit = rerun.Commit.__new__(rerun.Commit)
    commit.folder, commit.sha = shared.origin, shared.head
    commit.modes = {name: "100644" for name in FILES if name.startswith("test/")}
    commit.modes |= dict.fromkeys(["test/linked", "test/unit/test_link.py"], rerun.SYMLINK)
    try:
        request = rerun.read(f"/rerun-test {words}")
        ids = rerun.tests(request.words, commit) if request else []
    except rerun.RefusedError:
        return
    files = {name.partition("::")[0] for name in ids}
    assert files <= {name for name in FILES if re.fullmatch(r"test/.*/test_\w+\.py", name)}


def test_suites_are_read_as_sglang_reads_them(tmp_path):
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations
    spec = importlib.util.spec_from_file_location("ci", f"{folder}/test/ci/ci_register.py")
    theirs = importlib.util.module_from_spec(spec)
    sys.modules["ci"] = theirs
    spec.loader.exec_module(theirs)
    ours = [path.read_text() for path in (actions.ROOT / "test/registered").rglob("test_*.py")]
    texts = [
        *ours,
        *(FILES[name] for name in FILES if name.startswith("test/registered/kl/test_k")),
    ]
    texts += ["if True:\n    " + REGISTER, "x = " + REGISTER, "ci." + REGISTER, REGISTER * 2]
    texts += ["register_cpu_ci(1, 'cpu', False, 'off')\n", "register_cpu_ci(1, 'cpu', True)\n"]
    assert len(ours) >= 3
    for number, text in enumerate(texts):
        file = tmp_path / f"test_{number}.py"
        file.write_text(text)
        registries, _ = theirs.ut_parse_one_file(str(file))
        expected = {entry.effective_suite for entry in registries if entry.disabled is None}
        assert rerun.suites(text) == expected, text


class Written(rerun.Commit):
    """A commit that is only its files' texts."""

    def __init__(self, files: dict[str, str], mode: str = "100644"):
        self.sha, self.files, self.modes = "0" * 40, files, dict.fromkeys(files, mode)

    def text(self, path: str) -> str:
        return self.files[path]


def test_a_suite_has_no_symbolic_links():
    # The text of a link is its target, which may be named like anything.
    files = {MTP: "register_cuda_ci(1, suite='linked')"}
    assert Written(files).suites() == {"linked": [MTP]}
    assert Written(files, rerun.SYMLINK).suites() == {}


@pytest.mark.parametrize("many", [100, 101])
def test_a_suite_of_more_files_than_are_allowed(many):
    commit = Written({f"test/registered/test_{n}.py": REGISTER for n in range(many)})
    if many == 100:
        assert len(rerun.tests([OUR_SUITE], commit)) == 100
    else:
        with pytest.raises(rerun.RefusedError, match="101 files; 100 are allowed"):
            rerun.tests([OUR_SUITE], commit)


def test_a_file_that_is_too_long_registers_nothing():
    assert rerun.suites(REGISTER + "#" * rerun.MAX_FILE) == set()


def test_the_short_names_are_ours():
    registered = actions.ROOT / "test/registered/inkling"
    assert set(rerun.SHORT.values()) == {path.name for path in registered.glob("test_*.py")}


# ------------------------------------------------------------------------------ run and report


@pytest.fixture
def run(github: GitHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """``rerun.py run`` in a checkout of a commit with ``files``; its exit status."""

    def _run(files: dict[str, str], ids: list[str], python: str = sys.executable, **job) -> int:
        head = tmp_path / "head"
        actions.write(head, files)
        actions.git(head, "init", "-q")
        actions.git(head, "add", "-A")
        actions.git(head, "commit", "-q", "-m", "c")
        job = {"sha": actions.git(head, "rev-parse", "HEAD"), "tests": ids, **job}
        monkeypatch.chdir(head)
        for name in [name for name in rerun.os.environ if name.startswith("PYTEST_")]:
            monkeypatch.delenv(name)
        for name, value in github.environment(RERUN_JOB=json.dumps(job)).items():
            monkeypatch.setenv(name, value)
        return rerun.main(["run", "--python", python])

    return _run


SKIPPED = "import pytest\n\n\n@pytest.mark.skip\ndef test_it(): pass\n"


@pytest.mark.parametrize(
    ("text", "code", "counts"),
    [
        ("def test_it(): pass\n", 0, "1 passed, 0 failed, 0 skipped"),
        ("def test_it(): assert 0\n", 1, "0 passed, 1 failed, 0 skipped"),
        ("import nothing_like_it\n", 2, "0 passed, 1 failed, 0 skipped"),
        (SKIPPED, 1, "0 passed, 0 failed, 1 skipped"),
        (SKIPPED + "def test_other(): pass\n", 0, "1 passed, 0 failed, 1 skipped"),
        ("", 5, "0 passed, 0 failed, 0 skipped"),
    ],
)
def test_a_run_passes_only_when_something_ran(github, run, text, code, counts):
    assert run({"test/test_x.py": text}, ["test/test_x.py"]) == code
    assert github.outputs() == {"counts": counts}


def test_pytest_gets_the_ids_and_nothing_else(run, tmp_path):
    stub = tmp_path / "python"
    actions.executable(stub, f"import json, sys\njson.dump(sys.argv, open('{tmp_path}/a', 'w'))\n")
    ids = [f"{A}::TestA", MTP]
    assert run({"x": ""}, ids, str(stub)) == 1
    seen = json.loads((tmp_path / "a").read_text())
    assert seen[1:4] == ["-m", "pytest", "-v"] and seen[4].startswith("--junitxml=")
    assert seen[5:] == ids


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"tests": ["-k"]}, "'-k' is no test id"),
        ({"tests": ["test/../test_a.py"]}, "is no test id"),
        ({"tests": ["other/test_a.py"]}, "is no test id"),
        ({"tests": []}, "names no tests"),
        ({"sha": "0" * 40}, "not at 0000"),
    ],
)
def test_a_job_that_parse_did_not_write_is_not_run(run, capsys, job, message):
    assert run({"x": ""}, ["test/test_a.py"], **job) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_interpreter_that_is_not_there(run, capsys):
    assert run({"x": ""}, [A], "/nowhere/python") == 1
    assert capsys.readouterr().err == (
        "rerun.py: /nowhere/python does not start: No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("result", "counts", "state", "said"),
    [
        ("success", "3 passed, 0 failed, 1 skipped", "success", "passed: 3 passed, 0 failed"),
        ("failure", "2 passed, 1 failed, 0 skipped", "failure", "failed: 2 passed, 1 failed"),
        ("failure", "", "failure", "failed. [Log]"),
        ("cancelled", "", "error", "did not finish (cancelled). [Log]"),
        ("success", "@octocat 3 passed, 0 failed, 1 skipped", "success", "passed. [Log]"),
    ],
)
def test_the_outcome_is_answered(github, monkeypatch, result, counts, state, said):
    job = {"number": 7, "sha": github.head, "runner": GPU, "what": "mtp", "tests": [MTP]}
    more = {"RERUN_JOB": json.dumps(job), "RERUN_RESULT": result, "RERUN_COUNTS": counts}
    for name, value in github.environment(**more).items():
        monkeypatch.setenv(name, value)
    assert rerun.main(["report"]) == 0
    assert github.statuses() == [(github.head, state)]
    (reply,) = github.replies()
    assert reply.startswith(f"`mtp` at {github.head} on `{GPU}` {said}")

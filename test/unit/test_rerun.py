"""``/rerun-test``: what a comment may run, at which commit, and what is answered."""

import copy
import importlib.util
import json
import re
import runpy
from pathlib import Path

import actions
import pytest
import rerun
from actions import AFTER, BEFORE, COMMENTED, PULL, GitHub
from hypothesis import given, settings
from hypothesis import strategies as st

HOSTED, GPU, OTHER = "ubuntu-latest", "1-gpu-h100", "4-gpu-b200"
A, TWICE = "test/unit/test_a.py", "test_twice.py"
MTP, KL = "test/registered/inkling/test_inkling_mtp.py", "test/registered/kl/test_kl.py"
LINKS = {
    "test/unit/test_link.py": "../../secret.py",
    # The text of a link is its target, and a target can look like a registration.
    "test/registered/test_link_too.py": "register_cuda_ci(1, suite='linked')",
    "test/linked": "../other",
}
REGISTER = "register_cuda_ci(est_time=1, stage='base-b', runner_config='1-gpu-large')\n"
SUITE = "base-b-test-1-gpu-large"
FILES = {
    "secret.py": "",
    A: "class TestA:\n    def test_one(self): pass\n\n\ndef test_alone(): pass\n",
    MTP: REGISTER + "class TestMtp: pass\n",
    KL: REGISTER + "register_amd_ci(5, 'nightly-amd')\n",
    "test/registered/kl/test_off.py": REGISTER.replace("(", "(disabled='broken', ", 1),
    "test/registered/kl/test_hostile.py": "register_cuda_ci(1, suite='@all `x`')\n",
    "test/registered/kl/test_deep.py": "a." * 5000 + "a",
    "test/registered/kl/test_signs.py": "-" * 10_000 + "1",
    "test/registered/kl/test_not_python.py": "def (:\n",
    "test/registered/kl/test_long.py": REGISTER.replace("base", "long") + "#" * rerun.MAX_FILE,
    f"test/unit/{TWICE}": "",
    f"test/gpu/{TWICE}": REGISTER,
    "test/unit/helper.py": "",
    "other/test_other.py": "",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> GitHub:
    folder = tmp_path_factory.mktemp("rerun")
    github = GitHub(folder, {"README": "", "test/unit/test_on_main.py": ""})
    (github.origin / "test/unit/test_on_main.py").unlink()
    for name, target in LINKS.items():
        (github.origin / name).parent.mkdir(parents=True, exist_ok=True)
        (github.origin / name).symlink_to(target)
    github.open_pull(FILES)
    return github


@pytest.fixture
def github(shared: GitHub, monkeypatch: pytest.MonkeyPatch) -> GitHub:
    monkeypatch.setattr(shared, "answers", copy.deepcopy(shared.answers))
    return shared


@pytest.fixture
def parse(github: GitHub, monkeypatch: pytest.MonkeyPatch):
    """Give a comment to ``rerun.py parse``; return the job, or None."""

    def _parse(
        body: str, author: str = "MEMBER", is_pull: bool = True, gpu: str = GPU, more: str = OTHER
    ) -> dict | None:
        github.write_event(body, author, is_pull)
        github.set_environment(monkeypatch, GPU_RUNNER=gpu, RERUN_RUNNERS=more)
        monkeypatch.chdir(github.base)
        assert rerun.main(["parse"]) == 0
        if not github.outputs:
            return None
        job = json.loads(github.outputs["job"])
        assert (github.outputs["sha"], github.outputs["runner"]) == (job["sha"], job["runner"])
        return job

    return _parse


@pytest.mark.parametrize(
    ("words", "ids", "runner"),
    [
        (A, [A], HOSTED),
        ("test_a.py", [A], HOSTED),
        (f"{A}::TestA", [f"{A}::TestA"], HOSTED),
        ("test_a.py::TestA::test_one", [f"{A}::TestA::test_one"], HOSTED),
        ("test_a.py::test_alone", [f"{A}::test_alone"], HOSTED),
        ("test_inkling_mtp.py", [MTP], GPU),
        ("mtp", [MTP], GPU),
        (SUITE, [MTP, KL], GPU),
        ("nightly-amd", [KL], GPU),
        (f"{SUITE} mtp test_a.py", [MTP, KL, A], GPU),
        (f"mtp on {OTHER}", [MTP], OTHER),
        ("mtp on ubuntu-latest", [MTP], HOSTED),
        (f"  test_a.py   on   {GPU}  \r\n\n", [A], GPU),
        (f"test/unit/{TWICE}", [f"test/unit/{TWICE}"], HOSTED),
    ],
)
def test_what_the_comment_names_is_run(github, parse, words, ids, runner):
    job = parse(f"/rerun-test {words}")
    assert (job["tests"], job["runner"], job["sha"]) == (ids, runner, github.head)
    assert github.statuses == [(github.head, "pending")]
    (reply,) = github.replies
    assert github.head in reply and f"`{runner}`" in reply and "/actions/runs/42" in reply
    # The pull request's files stay in git's objects.
    assert not (github.base / A).exists() and (github.base / "test/unit/test_on_main.py").exists()


REFUSED = {
    "names no test": ["", "on 1-gpu-h100"],
    "not a test file": [
        *("secret.py", "/etc/test_passwd.py", "test/unit/helper.py", "-p.py"),
        *("test/../other/test_other.py", "../test_a.py", "test/unit/../unit/test_a.py"),
        *("test/./unit/test_a.py", "test//unit/test_a.py", "--rootdir/test_a.py"),
        "other/test_other.py",
    ],
    "symbolic link": ["test/unit/test_link.py", "test_link.py", "test/linked/test_other.py"],
    "There is no `test": ["test/unit/test_on_main.py", "test_absent.py", "test_other.py"],
    "2 files": [TWICE],
    "has no `TestB`": ["test_a.py::TestB"],
    "write `::Class`": ["test_a.py::TestA::a::b", "test_a.py::"],
    f"neither a test file nor a suite. Suites at {{head}}: `{SUITE}`, `nightly-amd`.": [
        *("no-such-suite", "-k", "--collect-only", "test/unit"),
    ],
    "not a runner": ["test_a.py on h100", "test_a.py on self-hosted", "test_a.py on --x"],
    "`on` takes one word": [
        *("test_a.py on", "test_a.py on 1-gpu-h100 4-gpu-b200"),
        "test_a.py on 1-gpu-h100 on 4-gpu-b200",
    ],
    "not the commit": [f"test_a.py at {'0' * 40}", "test_a.py at HEAD"],
    "ASCII": [
        *("test_a.py --deselect=x", "test_a.py'", '"test_a.py"', "test_a.py; id"),
        *("test_a.py $(id)", "test_a.py `id`", "${{ github.token }}", "test_a.py @octocat"),
        *("test_a.py\n/rerun-test mtp", "test_a.py\ttest_a.py", "test_a.py\0"),
        *("test_a.py 🚀", "test_\u0430.py"),
    ],
    "1000 are allowed": ["a" * 10_000],
    "20 are allowed": ["x " * 21],
}


@pytest.mark.parametrize(
    ("words", "reason"), [(words, reason) for reason, many in REFUSED.items() for words in many]
)
def test_what_is_refused_is_told_so(github, parse, words, reason):
    assert parse(f"/rerun-test {words}") is None
    (reply,) = github.replies
    assert reason.format(head=github.head[:12]) in reply and github.statuses == []
    assert "Allowed: `/rerun-test WHAT... [on RUNNER] [at COMMIT]`" in reply
    assert f"`{HOSTED}`, `{GPU}`, `{OTHER}`" in reply
    assert len(reply) < 2000
    for hostile in ("🚀", "$(", "${{", "@octocat", "@all", "; id", "aaaa"):
        assert hostile not in reply


def test_strangers_and_other_comments_get_neither_run_nor_reply(github, parse):
    for author in ("NONE", "CONTRIBUTOR", "", "member"):
        assert parse("/rerun-test test_a.py", author) is None and github.calls == []
    for body in ("", "hello", "/rerun-tests mtp", "see /rerun-test mtp", " /rerun-test mtp"):
        assert parse(body) is None and github.calls == []
    assert parse("/rerun-test test_a.py", is_pull=False) is None and github.calls == []


@pytest.mark.parametrize("author", rerun.TRUSTED)
def test_the_trusted_may_run_tests(github, parse, author):
    assert parse("/rerun-test test_a.py", author, gpu="", more="")["runner"] == HOSTED
    assert parse("/rerun-test mtp", author, gpu="", more="") is None
    assert "`GPU_RUNNER`" in github.replies[0]


@pytest.mark.parametrize(
    ("pushed", "after", "reason"),
    [
        (BEFORE, None, None),
        (AFTER, None, "pushed to after the comment"),
        (COMMENTED, None, "pushed to after the comment"),
        (BEFORE, "0" * 40, "pushed to after the comment"),
        ("no time", None, "does not say when"),
    ],
)
def test_a_fork_runs_as_it_was_when_the_comment_was_written(github, parse, pushed, after, reason):
    github.answers[PULL]["head"]["repo"] = {"full_name": "eve/inkling"}
    path = "repos/eve/inkling/activity?per_page=1&ref=refs%2Fheads%2Fa%20branch"
    github.answers[path] = [{"timestamp": pushed, "after": after or github.head}]
    assert (parse("/rerun-test test_a.py") is None) == bool(reason)
    assert not reason or (reason in github.replies[0] and f"at {github.head}" in github.replies[0])
    assert parse(f"/rerun-test test_a.py at {github.head}")["sha"] == github.head


def test_a_closed_pull_request_runs_nothing(github, parse):
    github.answers[PULL]["state"] = "closed"
    assert parse("/rerun-test test_a.py") is None and "closed" in github.replies[0]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GPU_RUNNER", "a;b", "'a;b': not a runner label"),
        ("GITHUB_REPOSITORY", "octo/nowhere", "gh api repos/octo/nowhere/pulls/7: gh: Not Found"),
        ("GITHUB_EVENT_PATH", "/nowhere", "not the event of a comment: [Errno 2]"),
        ("GITHUB_EVENT_PATH", __file__, "not the event of a comment: Extra data"),
        ("PATH", "/nowhere", "gh is not installed"),
    ],
)
def test_failures_are_one_line(github, monkeypatch, capsys, name, value, message):
    github.write_event("/rerun-test test_a.py")
    github.set_environment(monkeypatch, **{name: value})
    assert rerun.main(["parse"]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("rerun.py: ")


class Written(rerun.Commit):
    """A commit made of the texts of files and the targets of links."""

    def __init__(self, files: dict[str, str], links: dict[str, str]):
        self.sha, self.files = "0" * 40, {**files, **links}
        self.modes = {name: "100644" for name in files if name.startswith("test/")}
        self.modes |= dict.fromkeys(links, rerun.SYMLINK)

    def read_text(self, path: str) -> str:
        return self.files[path]


PIECES = st.sampled_from(
    [
        *(" ", " ", "on", "at", "mtp", SUITE, "::", "TestA", "-", "'", "é", "\n", "\0"),
        *("test", "unit", "/", "..", ".", "linked", "other"),
        *("test_a.py", "test_link.py", "secret.py", "test_other.py"),
    ]
)


@settings(max_examples=100, deadline=None)
@given(words=st.one_of(st.lists(PIECES, max_size=8).map("".join), st.text(max_size=30)))
def test_no_comment_reaches_beyond_the_test_files(words):
    try:
        request = rerun.read_request(f"/rerun-test {words}")
        ids = rerun.resolve_tests(request.words, Written(FILES, LINKS)) if request else []
    except rerun.RefusedError:
        return
    files = {name.partition("::")[0] for name in ids}
    assert files <= {name for name in FILES if re.fullmatch(r"test/.*/test_\w+\.py", name)}


def test_suites_are_read_as_sglang_reads_them(tmp_path):
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations
    parse_file = runpy.run_path(f"{folder}/test/ci/ci_register.py")["ut_parse_one_file"]
    ours = [path.read_text() for path in (actions.ROOT / "test/registered").rglob("test_*.py")]
    texts = [*ours, FILES[KL], "if True:\n    " + REGISTER, "x = " + REGISTER, "ci." + REGISTER]
    texts += ["register_cpu_ci(1, 'cpu', False, 'off')\n", "register_cpu_ci(1, 'cpu', True)\n"]
    assert len(ours) >= 3
    for number, text in enumerate([*texts, REGISTER * 2]):
        file = tmp_path / f"test_{number}.py"
        file.write_text(text)
        registries, _ = parse_file(str(file))
        expected = {entry.effective_suite for entry in registries if entry.disabled is None}
        assert rerun.read_suites(text) == expected, text


def test_a_suite_of_more_files_than_are_allowed():
    files = {f"test/registered/test_{number}.py": REGISTER for number in range(101)}
    with pytest.raises(rerun.RefusedError, match="101 files; 100 are allowed"):
        rerun.resolve_tests([SUITE], Written(files, {}))
    files.popitem()
    assert len(rerun.resolve_tests([SUITE], Written(files, {}))) == 100


def test_each_of_our_registered_tests_has_a_short_name():
    registered = actions.ROOT / "test/registered/inkling"
    assert set(rerun.SHORT_NAMES.values()) == {path.name for path in registered.glob("test_*.py")}


# ------------------------------------------------------------------------------ run and report


@pytest.fixture
def run(github: GitHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Call ``rerun.py run`` in a checkout of two tests, of which the job names one."""

    def _run(text: str = "", **job: object) -> int:
        files = {"test/test_x.py": text, "test/test_y.py": "def test_y(): assert 0\n"}
        job = {**JOB, "sha": actions.commit_files(tmp_path, files), **job}
        github.set_environment(monkeypatch, RERUN_JOB=json.dumps(job))
        monkeypatch.chdir(tmp_path)
        return rerun.main(["run"])

    return _run


JOB = {"number": 7, "runner": GPU, "what": "mtp", "tests": ["test/test_x.py"]}
SKIPPED = "import pytest\n\n\n@pytest.mark.skip\ndef test_it(): pass\n"


@pytest.mark.parametrize(
    ("text", "code", "counts"),
    [
        ("def test_it(): pass\n", 0, "1 passed, 0 failed, 0 skipped"),
        ("import nothing_like_it\n", 2, "0 passed, 1 failed, 0 skipped"),
        (SKIPPED, 1, "0 passed, 0 failed, 1 skipped"),
        (SKIPPED + "def test_other(): pass\n", 0, "1 passed, 0 failed, 1 skipped"),
    ],
)
def test_a_run_passes_only_if_a_test_ran(github, run, text, code, counts):
    assert run(text) == code
    assert github.outputs == {"counts": counts}


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"tests": ["-k"]}, "'-k' is not a test id"),
        ({"tests": ["test/../test_a.py"]}, "is not a test id"),
        ({"tests": ["other/test_a.py"]}, "is not a test id"),
        ({"tests": []}, "names no tests"),
        ({"sha": "0" * 40}, "not at 0000"),
    ],
)
def test_a_job_that_cannot_be_run_is_one_line(run, capsys, job, message):
    assert run(**job) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("result", "counts", "state", "outcome"),
    [
        ("success", "3 passed, 0 failed, 1 skipped", "success", "passed: 3 passed, 0 failed"),
        ("failure", "2 passed, 1 failed, 0 skipped", "failure", "failed: 2 passed, 1 failed"),
        ("failure", "", "failure", "failed. [Log]"),
        ("cancelled", "", "error", "did not finish (cancelled). [Log]"),
        ("success", "@octocat 3 passed, 0 failed, 1 skipped", "success", "passed. [Log]"),
    ],
)
def test_the_outcome_is_answered(github, monkeypatch, result, counts, state, outcome):
    job = json.dumps({**JOB, "sha": github.head})
    variables = {"RERUN_JOB": job, "RERUN_RESULT": result, "RERUN_COUNTS": counts}
    github.set_environment(monkeypatch, **variables)
    assert rerun.main(["report"]) == 0
    assert github.statuses == [(github.head, state)]
    (reply,) = github.replies
    assert reply.startswith(f"`mtp` at {github.head} on `{GPU}` {outcome}")

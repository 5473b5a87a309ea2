"""``/rerun-test``: whose comment may run what, at which commit, and what is answered."""

import copy
import importlib.util
import itertools
import json
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import actions
import github_api
import gpu_test
import pytest
import rerun
from actions import NUMBER, OWNER, PULL, REPOSITORY, REVIEWS, GitHub, make_user, name_permission
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
        body: str,
        author: str = "MEMBER",
        is_pull: bool = True,
        gpu: str = GPU,
        more: str = OTHER,
        **fields: Any,
    ) -> dict | None:
        github.write_event(body, author, is_pull, **fields)
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


@pytest.mark.parametrize(
    ("author", "permission", "role", "may"),
    [
        ("OWNER", "admin", "admin", True),
        ("MEMBER", "write", "maintain", True),
        ("COLLABORATOR", "write", "write", True),
        ("COLLABORATOR", "read", "triage", False),
        ("MEMBER", "read", "read", False),
        ("OWNER", "none", "none", False),
    ],
)
def test_only_write_permission_runs_tests(github, parse, author, permission, role, may):
    github.permit(person := make_user("Per-son_x", 9), permission, role)
    job = parse("/rerun-test test_a.py", author, user=person)
    assert (job is not None) == bool(github.statuses) == may
    assert may or "takes write permission" in github.replies[0]


BOT, HELPER = make_user("helper[bot]", 3, "Bot"), make_user("helper", 4, "Bot")


def test_bots_and_apps_get_neither_run_nor_reply(github, parse):
    # GitHub answers for a bot's login as well.
    github.permit(HELPER, "write")
    github.permit(BOT, "write")
    for fields in ({"user": BOT}, {"user": HELPER}, {"performed_via_github_app": {"id": 5}}):
        assert parse("/rerun-test test_a.py", **fields) is None and github.calls == []


@pytest.mark.parametrize(
    "answer",
    [
        *(None, "", "{", "[]", "null", "3", '"write"', "[" * 100_000),
        {},
        {"permission": "write"},
        {"permission": ["write"], "user": OWNER},
        {"permission": None, "user": OWNER},
        {"permission": "write", "user": None},
        # The login had another owner when the comment was written.
        {"permission": "write", "user": {**OWNER, "id": 2}},
    ],
)
def test_whose_permission_cannot_be_asked_is_refused(github, parse, answer):
    github.answers[name_permission(OWNER["login"])] = answer
    if answer is None:
        del github.answers[name_permission(OWNER["login"])]
    assert parse("/rerun-test test_a.py") is None and github.statuses == []
    assert re.search("does not say what permission `Owner` has|takes write perm", github.replies[0])


@pytest.mark.parametrize("login", ["../../x", "a/b", "a?b", "", "-x", "a b", "é", "x" * 200 + "/"])
def test_a_login_of_another_form_is_not_asked_about(github, parse, login):
    assert parse("/rerun-test test_a.py", user=make_user(login, 1)) is None
    assert [path for method, path, _ in github.calls if method == "GET"] == []


def test_tests_that_need_a_gpu(github, parse):
    assert parse("/rerun-test test_a.py", gpu="", more="")["runner"] == HOSTED
    assert parse("/rerun-test mtp", gpu="", more="") is None
    assert "`GPU_RUNNER`" in github.replies[0] and f"`on {HOSTED}`" in github.replies[0]
    # What `make gpu-test` runs.
    parts = {word for part in gpu_test.PARTS.values() for word in part if word.startswith("test/")}
    for path in map(actions.ROOT.joinpath, parts):
        for file in path.rglob("test_*.py") if path.is_dir() else (path,):
            name = str(file.relative_to(actions.ROOT))
            assert rerun.choose_runner(None, [A, f"{name}::test_it"], [GPU]) == GPU, name
    for place in rerun.NEEDS_GPU:
        assert (actions.ROOT / place).exists()
    assert rerun.choose_runner(None, ["test/unit/test_draft.py"], [GPU]) == HOSTED


WRITER, TRIAGER, EVE = make_user("writer", 11), make_user("triager", 12), make_user("eve", 13)


HEAD, OLD = "the head", "0" * 40


def make_review(user: Any, day: int, commit: str = HEAD, **fields: Any) -> dict:
    moment = f"2026-11-{day:02}T12:00:00Z"
    review = {"user": user, "state": "APPROVED", "commit_id": commit, "submitted_at": moment}
    return {**review, "author_association": "MEMBER", **fields}


MISSING, STALE = "by a person with write permission is missing", "permission is not for its head"


@pytest.mark.parametrize(
    ("reviews", "reason"),
    [
        ([], MISSING),
        ([make_review(WRITER, 1)], None),
        ([make_review(WRITER, 1, OLD), make_review(WRITER, 2)], None),
        # The fork was pushed to after the approval.
        ([make_review(WRITER, 1, OLD)], STALE),
        ([make_review(WRITER, 1), make_review(WRITER, 2, OLD)], STALE),
        ([make_review(WRITER, 2, OLD), make_review(WRITER, 1)], STALE),
        # Neither counts: who may not write, and what is no approval.
        ([make_review(TRIAGER, 1)], MISSING),
        ([make_review(EVE, 1, author_association="NONE")], MISSING),
        ([make_review(EVE, 1, author_association="CONTRIBUTOR")], MISSING),
        ([make_review(BOT, 1)], MISSING),
        ([make_review(HELPER, 1)], MISSING),
        ([make_review(None, 1)], MISSING),
        ([make_review(WRITER, 1), make_review(TRIAGER, 2, OLD)], None),
        ([make_review(WRITER, 1, state="COMMENTED")], MISSING),
        ([make_review(WRITER, 1, state="DISMISSED")], MISSING),
        ([make_review(WRITER, 1, state="CHANGES_REQUESTED")], MISSING),
        ([make_review(WRITER, 1), make_review(WRITER, 2, OLD, state="COMMENTED")], None),
        # Nobody can say who is the last.
        ([make_review(make_user("nobody", 14), 1)], "what permission `nobody` has"),
        ([make_review(WRITER, 1, commit_id=None)], "who approved"),
        ([make_review({"login": 3}, 1)], "who approved"),
        ([make_review("writer", 1)], "who approved"),
        (["approved"], "who approved"),
        (None, "who approved"),
        ("", "who approved"),
        ("3", "who approved"),
        ("null", "who approved"),
        ("[[[]]]", "who approved"),
    ],
)
def test_a_fork_runs_what_is_approved(github, parse, reviews, reason):
    for user, permission in (
        (WRITER, "write"),
        (TRIAGER, "read"),
        (BOT, "write"),
        (HELPER, "write"),
    ):
        github.permit(user, permission)
    github.answers[PULL]["head"]["repo"] = {"full_name": "eve/inkling"}
    if isinstance(reviews, list):
        for review in (r for r in reviews if isinstance(r, dict)):
            review["commit_id"] = (
                github.head if review["commit_id"] == HEAD else review["commit_id"]
            )
        # Reviews come in pages.
        github.answers[REVIEWS] = [reviews[:1], reviews[1:]]
    elif reviews is not None:
        github.answers[REVIEWS] = reviews
    assert (parse("/rerun-test test_a.py") is None) == bool(reason)
    if reason:
        (reply,) = github.replies
        assert reason in reply and github.statuses == [] and "from a fork needs it" in reply
        assert "permission `" in reason or f"`at {github.head}`" in reply


@pytest.mark.parametrize("source", [{"full_name": "eve/inkling"}, None, {}, 3])
def test_a_fork_runs_what_is_named(github, parse, source):
    github.answers[PULL]["head"]["repo"] = source
    if source is None:
        del github.answers[PULL]["head"]["repo"]
    github.answers[REVIEWS] = [[]]
    assert parse(f"/rerun-test test_a.py at {github.head}")["sha"] == github.head
    assert parse(f"/rerun-test test_a.py at {OLD}") is None
    if source != 3:
        assert parse("/rerun-test test_a.py") is None and github.statuses == []


def test_one_call_a_reviewer(github, parse):
    github.answers[PULL]["head"]["repo"] = {"full_name": "eve/inkling"}
    github.permit(TRIAGER, "read")
    strangers = [make_review(EVE, 1, author_association="NONE")] * 100
    github.answers[REVIEWS] = [strangers, [make_review(TRIAGER, 2)] * 100]
    assert parse("/rerun-test test_a.py") is None
    asked = [path for _, path, _ in github.calls if path.endswith("/permission")]
    assert asked == [name_permission("Owner"), name_permission("triager")]


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
        ("GITHUB_OUTPUT", "/", "IsADirectoryError"),
    ],
)
def test_failures_are_one_line(github, monkeypatch, capsys, name, value, message):
    # The repository in which nothing is found.
    github.answers["repos/octo/nowhere/collaborators/Owner/permission"] = github.answers[
        name_permission("Owner")
    ]
    github.write_event("/rerun-test test_a.py")
    github.set_environment(monkeypatch, **{name: value})
    monkeypatch.chdir(github.base)
    assert rerun.main(["parse"]) == 1
    assert message in read_line(capsys)


def read_line(capsys) -> str:
    """Return the one line that was printed for an error."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("rerun.py: "), error
    assert error.removesuffix("\n").isprintable() and len(error) < 600
    return error


def test_without_gh_it_is_one_line(github, monkeypatch, capsys):
    github.write_event("/rerun-test test_a.py")
    github.set_environment(monkeypatch, PATH="/nowhere")
    assert rerun.main(["parse"]) == 1
    assert "gh is not installed" in read_line(capsys)


STRANGE = ["", "null", "{", "[]", "{}", "3", '"\\ud800"', "[" * 100_000, "\0\x1b[2J"]
STRANGE += ['{"head": null}', '{"head": []}', '{"head": {"sha": 3}}', '{"head": {"sha": "x\\ny"}}']


@pytest.mark.parametrize("answer", STRANGE)
def test_a_strange_answer_is_one_line(github, monkeypatch, capsys, answer):
    github.answers[PULL] = answer
    github.write_event("/rerun-test test_a.py")
    github.set_environment(monkeypatch)
    assert rerun.main(["parse"]) == 1 and github.outputs == {}
    assert "GitHub" in read_line(capsys)


def test_a_strange_event_is_one_line(github, monkeypatch, capsys):
    github.write_event("/rerun-test test_a.py")
    github.set_environment(monkeypatch)
    file = github.folder / "event.json"
    known = json.loads(file.read_text())
    texts = list(STRANGE)
    for value in (None, [], {}, 3, "\ud800"):
        for key in ("user", "body", "author_association"):
            texts.append(json.dumps({**known, "comment": {**known["comment"], key: value}}))
        texts += [json.dumps({**known, key: value}) for key in ("comment", "issue")]
    for text in texts:
        file.write_text(text)
        # Status 0: a comment that is not a request, or by nobody who is known.
        if rerun.main(["parse"]):
            read_line(capsys)
        assert capsys.readouterr().err == "" and github.calls == []


def test_what_git_says_is_one_line(github, monkeypatch, capsys):
    words = "a\nb\r\x1b[31m\u2028" + "c" * 5000
    actions.write_program(github.folder / "bin/git", f"import sys\nsys.exit({words!r})")
    try:
        github.write_event("/rerun-test test_a.py")
        github.set_environment(monkeypatch)
        assert rerun.main(["parse"]) == 1
    finally:
        (github.folder / "bin/git").unlink()
    read_line(capsys)


def test_the_outputs_come_before_what_can_fail(github, monkeypatch, capsys):
    reply = f"POST repos/{REPOSITORY}/issues/{NUMBER}/comments"
    for call in (reply, f"POST repos/{REPOSITORY}/statuses/{github.head}"):
        github.answers[call] = "gh: Forbidden (HTTP 403)"
        github.write_event("/rerun-test test_a.py")
        github.set_environment(monkeypatch)
        monkeypatch.chdir(github.base)
        monkeypatch.setattr(rerun, "PAUSES", (0, 0))
        assert rerun.main(["parse"]) == 1
        assert "Forbidden" in read_line(capsys) and github.outputs.keys() == {
            "runner",
            "sha",
            "job",
        }
    assert len(github.statuses) == 3


def test_the_job_fits_into_a_variable(tmp_path, monkeypatch):
    github = GitHub(tmp_path / "hub", {"README": ""})
    place = f"test/registered/{'/'.join(['d' * 200] * 8)}"
    github.open_pull({f"{place}/test_{number}.py": REGISTER for number in range(98)})
    github.write_event(f"/rerun-test {SUITE}")
    github.set_environment(monkeypatch, GPU_RUNNER=GPU)
    monkeypatch.chdir(github.base)
    assert rerun.main(["parse"]) == 0
    assert github.outputs == {} and github.statuses == []
    assert re.search(r"take 1[67]\d{4} bytes; 100000 are allowed", github.replies[0])


def test_an_output_has_a_bound(github, monkeypatch):
    github.set_environment(monkeypatch)
    github_api.write_output("long", "é" * (github_api.MAX_OUTPUT // 2))
    with pytest.raises(rerun.ActionError, match="100001 bytes; 100000 are allowed"):
        github_api.write_output("long", "é" * (github_api.MAX_OUTPUT // 2) + "e")
    assert len(github.outputs["long"].encode()) == github_api.MAX_OUTPUT


def test_two_long_requests_have_two_statuses(github, parse):
    contexts = set()
    for last in ("mtp", SUITE, "nightly-amd"):
        for runner in (GPU, OTHER):
            assert parse(f"/rerun-test {'test_a.py ' * 19}{last} on {runner}")
            contexts |= {*github.contexts}
    assert len(contexts) == 6 and all(len(context) <= 200 for context in contexts)
    parse("/rerun-test mtp")
    assert github.contexts == [f"rerun-test: mtp on {GPU}"]


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
        ids = rerun.resolve_tests(request.words, Written(FILES, LINKS))
    except rerun.RefusedError:
        return
    assert {name.partition("::")[0] for name in ids} <= TESTS


TESTS = {name for name in FILES if re.fullmatch(r"test/.*/test_\w+\.py", name)}
CANARY = "canary"
FRAMES = [
    *("{}", " {}", " test_a.py {}", " {} test_a.py", " test_a.py::{}", " test/unit/{}/test_a.py"),
    *(" {}.py", " test_a.py on {}", " test_a.py at {}", " mtp on 1-gpu-h100 {}"),
]
HOSTILE = [
    *(f"; touch {CANARY}", f"$(touch {CANARY})", f"`touch {CANARY}`", f"|touch {CANARY}"),
    *(f"\ntouch {CANARY}", f"'; touch {CANARY}; '", f'"; touch {CANARY}; "'),
    *(f"${{{{ github.token }}}} > {CANARY}", f"--upload-pack=touch {CANARY}", "-c core.pager=id"),
    *(f"--output={CANARY}", f"--junitxml={CANARY}", f"-p {CANARY}", "--rootdir=/", "@/etc/passwd"),
    *("../../secret", "/etc/passwd", "secret.py", "test/unit/test_link", "HEAD:secret.py"),
    *(":(top)secret.py", f"ext::sh -c touch% {CANARY}", "a\r\n::set-output name=job::{}"),
    *(f"a\njob={{}}\nrunner={OTHER}", "\0\x1b[2J\u202e"),
]
COMMENTS = [
    rerun.COMMAND + frame.replace("{}", words)
    for words, frame in itertools.product(HOSTILE, FRAMES)
]

EVENTS: list[tuple[str, tuple]] | None = None


def note_event(name: str, arguments: tuple) -> None:
    # What a Python process can do outside itself raises one of these.
    if EVENTS is not None and name.partition(".")[0] in ("open", "os", "subprocess", "shutil"):
        EVENTS.append((name, arguments))


sys.addaudithook(note_event)


@contextmanager
def note_events() -> Iterator[list[tuple[str, tuple]]]:
    """Note the audit events of this process."""
    global EVENTS
    EVENTS = events = []
    try:
        yield events
    finally:
        EVENTS = None


def test_hostile_comments(github, monkeypatch, record_property):
    assert len(set(COMMENTS)) == 250
    github.set_environment(monkeypatch, GPU_RUNNER=GPU, RERUN_RUNNERS=OTHER)
    monkeypatch.chdir(github.base)

    def handle(body: str) -> tuple[list[list[str]], set[str], list[str], str]:
        """Return the commands, the paths and the other deeds of ``parse``; and the job."""
        github.write_event(body)
        (github.folder / "output").write_text("")
        with note_events() as events:
            assert rerun.main(["parse"]) == 0
        commands = [list(a[1]) for name, a in events if name == "subprocess.Popen"]
        opened = {str(a[0]) for name, a in events if name == "open" and type(a[0]) is not int}
        known = ("open", "subprocess.Popen", "os.putenv", "os.listdir", "os.scandir")
        others = [name for name, _ in events if name not in known]
        return commands, opened, others, github.outputs.get("job", "")

    usual = [handle(f"/rerun-test {words}") for words in ("mtp test_a.py", SUITE, "no-suite")]
    assert usual[0][3] and usual[1][3] and usual[0][0]
    words = {word for commands, *_ in usual for command in commands for word in command}
    words |= {f"{github.head}:{name}" for name in TESTS}
    files = {name for _, opened, *_ in usual for name in opened}
    # Python looks for the file of a text that it cannot parse.
    assert {Path(name).name for name in files} <= {"event.json", "output", "<unknown>"}
    shells, arguments, others, jobs = 0, 0, 0, 0
    for body in COMMENTS:
        commands, opened, deeds, job = handle(body)
        shells += any(command[0] not in ("gh", "git") for command in commands)
        arguments += any(word not in words for command in commands for word in command)
        ran = {name.partition("::")[0] for name in json.loads(job)["tests"]} if job else set()
        others += not (opened <= files and ran <= TESTS and deeds == usual[0][2])
        jobs += bool(job)
    places = (github.folder, github.base, github.origin, Path.cwd())
    assert not any((place / CANARY).exists() for place in places)
    record_property(
        "table",
        f"{len(COMMENTS)} hostile comments, {jobs} of them started a test of the pull request: "
        f"{shells} reached a shell, {arguments} an argument of git, {others} another file",
    )
    assert (shells, arguments, others) == (0, 0, 0)


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
        # The tests did not end: the setup failed, or the time was up.
        ("failure", "", "error", "did not finish (failure). [Log]"),
        ("failure", "@octocat 1 passed", "failure", "failed. [Log]"),
        ("skipped", "", "error", "did not finish (skipped). [Log]"),
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


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_status_is_tried_again(github, monkeypatch, capsys, failures):
    made, call_api = [], rerun.github.call_api

    def fail_first(path: str, data: object = None, **options: Any) -> Any:
        made.append(path)
        if len(made) <= failures:
            raise rerun.ActionError("gh: Bad Gateway (HTTP 502)")
        return call_api(path, data, **options)

    pauses: list[float] = []
    monkeypatch.setattr(rerun.github, "call_api", fail_first)
    monkeypatch.setattr(rerun.time, "sleep", pauses.append)
    job = json.dumps({**JOB, "sha": github.head})
    github.set_environment(monkeypatch, RERUN_JOB=job, RERUN_RESULT="cancelled")
    assert rerun.main(["report"]) == (failures == 3)
    assert github.statuses == ([] if failures == 3 else [(github.head, "error")])
    assert pauses == list(rerun.PAUSES)[:failures]
    assert failures < 3 or "502" in read_line(capsys)

"""The one issue that upstream.yml keeps."""

import io
import json
from dataclasses import asdict

import github_api
import pytest
import upstream
from actions import REPOSITORY, GitHub
from inkling_sconv.trees import watch

ANSWER = asdict(watch.Answer(True, "SGLang 0.5.24 is exempt", "| a | b |", ()))
CHANGED = {**ANSWER, "title": "SGLang 0.5.25 is unknown"}
ISSUES = f"repos/{REPOSITORY}/issues"
OURS = {
    **{"number": 3, "state": "open", "title": ANSWER["title"]},
    **{"body": f"{upstream.MARK}\r\n| a | b |", "user": {"login": upstream.AUTHOR}},
}
NEW = [("POST", ISSUES)]
EDIT = [("PATCH", f"{ISSUES}/3"), ("POST", f"{ISSUES}/3/comments")]


@pytest.fixture
def report(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Call upstream.py in a repository that has ``issues``; return the writing calls."""
    github = GitHub(tmp_path, {"README": ""})

    def _report(answer: dict, *issues: dict, suite: str = "success") -> list[tuple]:
        github.answers[f"{ISSUES}?state=all&per_page=100"] = [list(issues), []]
        github.set_environment(monkeypatch, WATCH=json.dumps(answer), SUITE_RESULT=suite)
        assert upstream.main(["report"]) == 0
        return [call for call in github.calls if call[0] != "GET"]

    return _report


@pytest.mark.parametrize(
    ("answer", "issues", "calls"),
    [
        ({**ANSWER, "new": False}, [], []),
        ({**ANSWER, "new": False}, [OURS], []),
        (ANSWER, [], NEW),
        (ANSWER, [OURS], []),
        (ANSWER, [{**OURS, "state": "closed"}], []),
        (CHANGED, [OURS], EDIT),
        (CHANGED, [OURS, {**OURS, "number": 5, "state": "closed"}], NEW),
        (ANSWER, [{**OURS, "user": {"login": "eve"}}], NEW),
        (ANSWER, [{**OURS, "body": "no mark"}, {**OURS, "body": None}], NEW),
        (ANSWER, [{**OURS, "pull_request": {}}], NEW),
    ],
)
def test_news_opens_or_updates_the_one_issue(report, answer, issues, calls):
    made = report(answer, *issues)
    assert [(verb, path) for verb, path, _ in made] == calls
    assert all(answer["title"] in json.dumps(data) for _, _, data in made)


def test_what_the_issue_says(report):
    ((_, _, data),) = report(ANSWER, suite="failure")
    failed = "The unit suite on this release: failure."
    assert data == {"title": ANSWER["title"], "body": f"{upstream.MARK}\n| a | b |\n\n{failed}\n"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unusable: JSONDecodeError"),
        ("[]", "unusable: TypeError"),
        ('{"title": "t", "body": "b"}', "unusable: KeyError('new')"),
        (json.dumps({**ANSWER, "new": "yes"}), "wrong types"),
        (json.dumps({**ANSWER, "title": "t\nu"}), "the title is not one line"),
        (json.dumps({**ANSWER, "title": "t\u2028u"}), "the title is not one line"),
        (json.dumps({**ANSWER, "title": "\ud800"}), "the title is not one line"),
        (json.dumps({**ANSWER, "title": ""}), "the title is not one line"),
        ("[" * 100_000, "unusable: RecursionError"),
        ("3", "unusable: TypeError"),
    ],
)
@pytest.mark.parametrize("command", ["output", "report"])
def test_an_unusable_answer_is_one_line(monkeypatch, capsys, text, message, command):
    monkeypatch.setenv("WATCH", text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert upstream.main([command]) == 1
    assert message in read_line(capsys)


def read_line(capsys) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("upstream.py: "), error
    return error


def test_a_body_that_github_would_not_take(monkeypatch, capsys):
    monkeypatch.setenv("WATCH", json.dumps({**ANSWER, "body": "b" * 60_001}))
    assert upstream.main(["report"]) == 1
    assert "longer than 60000" in read_line(capsys)


@pytest.mark.parametrize("sign", ["b", "é", "\U0001f600", '"'])
@pytest.mark.parametrize("length", [1000, 59_000, 10_000_000])
def test_every_answer_fits_into_a_variable(tmp_path, monkeypatch, sign, length):
    GitHub(tmp_path, {"README": ""}).set_environment(monkeypatch)
    body = sign * (length // len(json.dumps(sign)[1:-1]))
    text = json.dumps({**ANSWER, "title": sign * 250, "body": body, "releases": [body]})
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert upstream.main(["output"]) == 0
    output = (tmp_path / "output").read_text()
    assert output.startswith("watch=") and len(output.encode()) < github_api.MAX_OUTPUT
    told = json.loads(output.removeprefix("watch="))
    assert told.keys() == {"title", "body", "new"}
    kept = told["body"].removesuffix(upstream.CUT)
    assert body.startswith(kept) and (kept == body) == (length < 60_000)
    assert len(json.dumps(kept)) > min(length - 20, 50_000)


@pytest.mark.parametrize(
    "answer",
    [
        *("", "{", "null", "3", "[3]", "[[3]]", '[["x"]]', '[{"a": 1}]', "[" * 100_000),
        [[{**OURS, "number": None}]],
        [[{**OURS, "state": None, "title": None}]],
    ],
)
def test_a_strange_answer_of_github_is_one_line(tmp_path, monkeypatch, capsys, answer):
    github = GitHub(tmp_path, {"README": ""})
    github.answers[f"{ISSUES}?state=all&per_page=100"] = answer
    github.set_environment(monkeypatch, WATCH=json.dumps(CHANGED))
    assert upstream.main(["report"]) == 1
    read_line(capsys)
    assert [call for call in github.calls if call[0] != "GET"] == []

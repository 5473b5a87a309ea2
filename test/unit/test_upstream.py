"""The one issue that upstream.yml keeps."""

import json
from dataclasses import asdict

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
        assert upstream.main() == 0
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
        (json.dumps({**ANSWER, "title": ""}), "the title is not one line"),
        (json.dumps({**ANSWER, "body": "b" * 60_001}), "longer than 60000"),
    ],
)
def test_an_unusable_answer_is_one_line(monkeypatch, capsys, text, message):
    monkeypatch.setenv("WATCH", text)
    assert upstream.main() == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("upstream.py: ")

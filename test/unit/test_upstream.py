"""The one issue that upstream.yml keeps."""

from __future__ import annotations

import json

import pytest
import upstream
from actions import REPOSITORY, GitHub
from inkling_sconv.trees import watch

ANSWER = {"title": "SGLang 0.5.24 is exempt", "body": "| a | b |", "new": True}
CHANGED = {**ANSWER, "title": "SGLang 0.5.25 is unknown"}
ISSUES = f"repos/{REPOSITORY}/issues"
SENT = {"title": ANSWER["title"], "body": f"{upstream.MARK}\n| a | b |\n"}
OURS = {
    **{"number": 3, "state": "open", "title": ANSWER["title"]},
    **{"body": f"{upstream.MARK}\r\n| a | b |", "user": {"login": upstream.AUTHOR}},
}
NEW = [("POST", ISSUES, "title")]
EDIT = [("PATCH", f"{ISSUES}/3", "title"), ("POST", f"{ISSUES}/3/comments", "body")]


@pytest.fixture(scope="module")
def github(tmp_path_factory: pytest.TempPathFactory) -> GitHub:
    return GitHub(tmp_path_factory.mktemp("upstream"), {"README": ""})


@pytest.fixture
def report(github: GitHub, monkeypatch: pytest.MonkeyPatch):
    """Call ``upstream.py report`` in a repository that has ``issues``; return the writing calls."""

    def _report(answer: dict, *issues: dict, suite: str = "success") -> list[tuple]:
        github.answers[f"{ISSUES}?state=all&per_page=100"] = [list(issues), []]
        variables = {"WATCH": json.dumps(answer), "SUITE_RESULT": suite}
        for name, value in github.make_environment(**variables).items():
            monkeypatch.setenv(name, value)
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
    assert [(verb, path) for verb, path, _ in made] == [(verb, path) for verb, path, _ in calls]
    for (_, _, data), (_, _, field) in zip(made, calls, strict=True):
        assert answer["title"] in data[field]


def test_what_the_issue_says(report):
    assert report(ANSWER) == [("POST", ISSUES, SENT)]
    ((_, _, data),) = report(ANSWER, suite="failure")
    assert data["body"] == f"{SENT['body']}\nThe unit suite on this release: failure.\n"


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
        (None, "No such file or directory"),
    ],
)
def test_an_unusable_answer_is_one_line(tmp_path, capsys, text, message):
    if text is not None:
        (tmp_path / "watch.json").write_text(text)
    assert upstream.main(["output", str(tmp_path / "watch.json")]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("upstream.py: ")


def test_the_answer_of_watch_is_one_line_of_output(tmp_path, monkeypatch):
    answer = watch.Answer(True, "t", "a\nb", ()).as_dict()
    (tmp_path / "watch.json").write_text(json.dumps(answer, indent=1))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))
    assert upstream.main(["output", str(tmp_path / "watch.json")]) == 0
    (line,) = (tmp_path / "output").read_text().splitlines()
    name, _, value = line.partition("=")
    assert name == "watch"
    assert json.loads(value) == {"title": "t", "body": "a\nb", "new": True}

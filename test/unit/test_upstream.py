"""The one issue that upstream.yml keeps."""

from __future__ import annotations

import json

import actions
import pytest
import upstream
from actions import REPOSITORY, GitHub

ANSWER = {"title": "SGLang 0.5.24 is exempt", "body": "| a | b |", "new": True, "releases": []}
LIST = f"repos/{REPOSITORY}/issues?state=all&per_page=100"


@pytest.fixture
def report(tmp_path, monkeypatch):
    """``upstream.py report`` where ``issues`` are there; the calls that write."""

    def _report(*issues, suite="success", **answer):
        github = GitHub(tmp_path / f"hub-{len(list(tmp_path.iterdir()))}")
        github.answers[LIST] = [list(issues), []]
        watch = json.dumps({**ANSWER, **answer})
        for name, value in github.environment(WATCH=watch, SUITE_RESULT=suite).items():
            monkeypatch.setenv(name, value)
        assert upstream.main(["report"]) == 0
        return [
            (verb, path, data) for verb in ("POST", "PATCH") for path, data in calls(github, verb)
        ]

    def calls(github, verb):
        return [(path.removeprefix(f"repos/{REPOSITORY}/"), d) for path, d in github.calls(verb)]

    return _report


def issue(number=3, state="open", login=upstream.AUTHOR, **fields):
    body = f"{upstream.MARK}\r\n{ANSWER['body']}"
    user = {"login": login}
    return {
        **{"number": number, "state": state, "user": user, "title": ANSWER["title"], "body": body},
        **fields,
    }


def test_nothing_new_writes_nothing(report):
    assert report(new=False) == [] and report(issue(), new=False) == []


def test_the_first_news_opens_an_issue(report):
    ((verb, path, data),) = report()
    assert (verb, path, data["title"]) == ("POST", "issues", ANSWER["title"])
    assert data["body"] == f"{upstream.MARK}\n| a | b |\n"


@pytest.mark.parametrize("state", ["open", "closed"])
def test_the_same_news_is_told_once(report, state):
    assert report(issue(state=state)) == []


def test_other_news_updates_the_open_issue(report):
    (comment, edit) = report(issue(), title="SGLang 0.5.25 is unknown")
    assert edit[:2] == ("PATCH", "issues/3") and edit[2]["title"] == "SGLang 0.5.25 is unknown"
    assert comment[1] == "issues/3/comments" and "0.5.25" in comment[2]["body"]


def test_other_news_after_the_issue_was_closed_opens_one(report):
    ((verb, path, _),) = report(issue(), issue(5, state="closed"), title="Another")
    assert (verb, path) == ("POST", "issues")


@pytest.mark.parametrize(
    "other", [{"login": "eve"}, {"body": "no mark"}, {"body": None}, {"pull_request": {}}]
)
def test_an_issue_that_is_not_ours_is_left_alone(report, other):
    ((verb, path, _),) = report(issue(**other))
    assert (verb, path) == ("POST", "issues")


def test_a_suite_that_fails_is_told(report):
    ((_, _, data),) = report(suite="failure")
    assert data["body"].endswith("\n\nThe unit suite on this release: failure.\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unusable: JSONDecodeError"),
        ("[]", "unusable: TypeError"),
        ('{"title": "t", "body": "b"}', "unusable: KeyError('new')"),
        ('{"title": "t", "body": "b", "new": "yes"}', "wrong types"),
        ('{"title": "t\\nu", "body": "b", "new": true}', "title is not one line"),
        ('{"title": "", "body": "b", "new": true}', "title is not one line"),
        (json.dumps({**ANSWER, "body": "b" * 60_001}), "longer than 60000"),
        (None, "No such file or directory"),
    ],
)
def test_an_answer_that_is_unusable_is_one_line(tmp_path, monkeypatch, capsys, text, message):
    file = tmp_path / "watch.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))
    assert upstream.main(["output", str(file)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("upstream.py: ")


def test_the_answer_is_one_line_of_output(tmp_path, monkeypatch):
    (tmp_path / "watch.json").write_text(json.dumps({**ANSWER, "body": "a\nb"}, indent=1))
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "output"))
    assert upstream.main(["output", str(tmp_path / "watch.json")]) == 0
    name, _, value = (tmp_path / "output").read_text().partition("=")
    assert name == "watch" and value.count("\n") == 1
    assert json.loads(value) == {"title": ANSWER["title"], "body": "a\nb", "new": True}


def test_the_fields_are_those_of_watch():
    watch = pytest.importorskip("inkling_sconv.trees.watch")
    answer = watch.Answer(True, "t", "b", ()).as_dict()
    assert upstream.checked(json.dumps(answer)) == {"title": "t", "body": "b", "new": True}


def test_the_workflow_gives_what_the_script_reads():
    text = (actions.WORKFLOWS / "upstream.yml").read_text()
    assert "WATCH: ${{ needs.watch.outputs.watch }}" in text

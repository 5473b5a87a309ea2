"""Keep one issue about what ``inkling-sconv watch --json`` answers.

``output`` makes an output of the step of the answer on standard input. ``report`` reads it from the
variable WATCH and may write issues. The job that runs ``watch`` executes SGLang and may not; so
``report`` checks the answer again.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import github_api as github
from github_api import ActionError

MARK = "<!-- inkling-sconv watch -->"
AUTHOR = "github-actions[bot]"
# GitHub takes 65,536 characters.
MAX_BODY = 60_000
CUT = "\n\nCut here; `inkling-sconv watch` prints all of it."


def read_answer(text: str) -> dict[str, Any]:
    """Return the fields ``title``, ``body`` and ``new`` of the answer of ``watch``, checked."""
    try:
        answer = json.loads(text)
        fields = {name: answer[name] for name in ("title", "body", "new")}
        if [type(value) for value in fields.values()] != [str, str, bool]:
            raise ValueError("wrong types")
        if not fields["title"].isprintable() or not 0 < len(fields["title"]) <= 250:
            raise ValueError("the title is not one line")
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ActionError(f"the answer of inkling-sconv watch is unusable: {error!r}") from None
    return fields


def write_answer() -> int:
    """Set the output ``watch`` to the answer on standard input, with a body that fits."""
    answer = read_answer(sys.stdin.read())
    body = answer["body"]
    # JSON takes up to 12 bytes a character.
    while len(json.dumps(answer["body"])) > MAX_BODY:
        body = body[: len(body) * 9 // 10]
        answer["body"] = body + CUT
    github.write_output("watch", json.dumps(answer))
    return 0


def find_issue() -> dict[str, Any] | None:
    """Return the newest issue that this script opened, open or closed."""
    path = f"{github.get_repository()}/issues?state=all&per_page=100"
    # Anyone can write the mark, so the author has to be ours too.
    ours = [
        issue
        for issue in github.call_api(path, pages=True)
        if (issue.get("user") or {}).get("login") == AUTHOR
        and (issue.get("body") or "").startswith(MARK)
        and "pull_request" not in issue
    ]
    return max(ours, key=lambda issue: int(issue["number"]), default=None)


def report_news() -> int:
    """Open or update the issue if the answer has news."""
    answer = read_answer(github.read_variable("WATCH"))
    if len(answer["body"]) > MAX_BODY:
        raise ActionError(f"the body is longer than {MAX_BODY} characters")
    if not answer["new"]:
        print(f"nothing new: {answer['title']}")
        return 0
    body = f"{MARK}\n{answer['body'].rstrip()}\n"
    result = os.environ.get("SUITE_RESULT", "success")
    if result != "success":
        body += f"\nThe unit suite on this release: {result}.\n"
    sent = {"title": answer["title"], "body": body}
    issue, issues = find_issue(), f"{github.get_repository()}/issues"
    if issue and all(normalize(issue[key]) == normalize(text) for key, text in sent.items()):
        # A closed issue counts as well: somebody has dealt with this state.
        print(f"issue {issue['number']} says so already")
    elif issue and issue["state"] == "open":
        github.call_api(f"{issues}/{issue['number']}", sent, method="PATCH")
        # GitHub notifies people of a comment, but not of an edit.
        comment = {"body": f"Changed: {answer['title']}. [Log]({github.get_log_url()})"}
        github.call_api(f"{issues}/{issue['number']}/comments", comment)
    else:
        github.call_api(issues, sent)
    return 0


def normalize(text: str) -> str:
    """Undo what GitHub does to line ends and to space around a text."""
    return text.replace("\r\n", "\n").strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="upstream.py", description=__doc__)
    commands = {"output": write_answer, "report": report_news}
    parser.add_argument("command", choices=commands)
    return github.run_command("upstream.py", commands[parser.parse_args(arguments).command])


if __name__ == "__main__":
    sys.exit(main())

"""Pass on what ``inkling-sconv watch --json`` answers, and keep one issue about it.

upstream.yml calls ``output FILE`` in a job that has executed SGLang, and ``report`` in a job that
may write issues.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import github_api as github
from github_api import ActionError

MARK = "<!-- inkling-sconv watch -->"
AUTHOR = "github-actions[bot]"
MAX_BODY = 60_000


def read_answer(text: str) -> dict[str, Any]:
    """Return the fields ``title``, ``body`` and ``new`` of the answer of ``watch``, checked."""
    try:
        answer = json.loads(text)
        fields = {name: answer[name] for name in ("title", "body", "new")}
        if [type(value) for value in fields.values()] != [str, str, bool]:
            raise ValueError("wrong types")
        if "\n" in fields["title"] or not 0 < len(fields["title"]) <= 250:
            raise ValueError("the title is not one line")
        if len(fields["body"]) > MAX_BODY:
            raise ValueError(f"the body is longer than {MAX_BODY} characters")
    except (ValueError, LookupError, TypeError) as error:
        raise ActionError(f"the answer of inkling-sconv watch is unusable: {error!r}") from None
    return fields


def pass_on(file: Path) -> int:
    """Set the step's output ``watch``."""
    try:
        text = file.read_text()
    except OSError as error:
        raise ActionError(f"{file}: {error.strerror}") from None
    github.write_output("watch", json.dumps(read_answer(text)))
    return 0


def find_issue() -> dict[str, Any] | None:
    """Return the newest issue that this script opened, open or closed."""
    pages = github.call_api(f"{github.get_repository()}/issues?state=all&per_page=100", pages=True)
    # Anyone can write the mark, so the author has to be ours too.
    ours = [
        issue
        for page in pages
        for issue in page
        if (issue.get("user") or {}).get("login") == AUTHOR
        and (issue.get("body") or "").startswith(MARK)
        and "pull_request" not in issue
    ]
    return max(ours, key=lambda issue: int(issue["number"]), default=None)


def report_news() -> int:
    """Open or update the issue if the answer in WATCH has news."""
    answer = read_answer(github.read_variable("WATCH"))
    if not answer["new"]:
        print(f"nothing new: {answer['title']}")
        return 0
    body = f"{MARK}\n{answer['body'].rstrip()}\n"
    result = os.environ.get("SUITE_RESULT", "success")
    if result != "success":
        body += f"\nThe unit suite on this release: {result}.\n"
    sent = {"title": answer["title"], "body": body}
    issue = find_issue()
    if issue and all(normalize(issue[key]) == normalize(text) for key, text in sent.items()):
        # A closed issue counts as well: somebody has dealt with this state.
        print(f"issue {issue['number']} says so already")
    elif issue and issue["state"] == "open":
        place, log = f"{github.get_repository()}/issues/{issue['number']}", github.get_log_url()
        github.call_api(place, sent, method="PATCH")
        # GitHub notifies people of a comment, but not of an edit.
        github.call_api(
            f"{place}/comments",
            {"body": f"Changed: {answer['title']}. [Log]({log})"},
        )
    else:
        github.call_api(f"{github.get_repository()}/issues", sent)
    return 0


def normalize(text: str) -> str:
    """Undo what GitHub does to line ends and to space around a text."""
    return text.replace("\r\n", "\n").strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="upstream.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("output", help="pass the answer on").add_argument("file", type=Path)
    commands.add_parser("report", help="open or update the issue about the answer in WATCH")
    options = parser.parse_args(arguments)
    if options.command == "output":
        return github.run_command("upstream.py", lambda: pass_on(options.file))
    return github.run_command("upstream.py", report_news)


if __name__ == "__main__":
    sys.exit(main())

"""Keep one issue about what ``inkling-sconv watch --json`` answers (variable WATCH).

The job that runs this may write issues. It is not the job that runs ``watch``, which executes
SGLang; so the answer is checked here.
"""

import json
import os
import sys
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
    """Open or update the issue if the answer has news."""
    answer = read_answer(github.read_variable("WATCH"))
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


def main() -> int:
    """Report the news and return the exit status."""
    return github.run_command("upstream.py", report_news)


if __name__ == "__main__":
    sys.exit(main())

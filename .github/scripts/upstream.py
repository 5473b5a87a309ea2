"""What upstream.yml does with the answer of ``inkling-sconv watch --json``.

``output FILE`` passes the answer on; ``report`` opens or updates the one issue that tells of it.
They are two jobs, because the first has executed SGLang and the second may write.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rerun import ActionError, gh, log_url, output, variable

MARK = "<!-- inkling-sconv watch -->"
AUTHOR = "github-actions[bot]"
MAX_BODY = 60_000


def checked(text: str) -> dict[str, Any]:
    """The fields that are used of the answer."""
    try:
        answer = json.loads(text)
        found = {name: answer[name] for name in ("title", "body", "new")}
    except (ValueError, LookupError, TypeError) as error:
        raise ActionError(f"the answer of inkling-sconv watch is unusable: {error!r}") from None
    if [type(value) for value in found.values()] != [str, str, bool]:
        raise ActionError("the answer of inkling-sconv watch is unusable: wrong types")
    if "\n" in found["title"] or not 0 < len(found["title"]) <= 250:
        raise ActionError("the answer of inkling-sconv watch is unusable: title is not one line")
    if len(found["body"]) > MAX_BODY:
        raise ActionError(f"the answer of inkling-sconv watch is longer than {MAX_BODY} characters")
    return found


def command_output(file: Path) -> int:
    """Set the step's output ``watch``."""
    try:
        text = file.read_text()
    except OSError as error:
        raise ActionError(f"{file}: {error.strerror}") from None
    output("watch", json.dumps(checked(text)))
    return 0


def command_report() -> int:
    """Open or update the issue, when there is something to tell."""
    answer = checked(variable("WATCH"))
    if not answer["new"]:
        print(f"nothing new: {answer['title']}")
        return 0
    repository = variable("GITHUB_REPOSITORY")
    body = f"{MARK}\n{answer['body'].rstrip()}\n"
    if os.environ.get("SUITE_RESULT") not in ("success", None):
        body += f"\nThe unit suite on this release: {os.environ['SUITE_RESULT']}.\n"
    # Ours is told by author and mark: anyone can write the mark.
    issues = [
        issue
        for page in gh(f"repos/{repository}/issues?state=all&per_page=100", pages=True)
        for issue in page
        if (issue.get("user") or {}).get("login") == AUTHOR
        and (issue.get("body") or "").startswith(MARK)
        and "pull_request" not in issue
    ]
    newest = max(issues, key=lambda issue: int(issue["number"]), default=None)
    sent = {"title": answer["title"], "body": body}
    if newest is not None and {key: same(newest[key]) for key in sent} == {
        key: same(value) for key, value in sent.items()
    }:
        # Also when it is closed: somebody has dealt with this state.
        print(f"issue {newest['number']} says so already")
    elif newest is not None and newest["state"] == "open":
        place = f"repos/{repository}/issues/{newest['number']}"
        gh(place, sent, method="PATCH")
        # An edit notifies nobody.
        gh(f"{place}/comments", {"body": f"Changed: {answer['title']}. [Log]({log_url()})"})
    else:
        gh(f"repos/{repository}/issues", sent)
    return 0


def same(text: str) -> str:
    """``text`` as it compares after a trip through GitHub."""
    return text.replace("\r\n", "\n").strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; a failure is one line."""
    parser = argparse.ArgumentParser(prog="upstream.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("output", help="pass the answer on").add_argument("file", type=Path)
    commands.add_parser("report", help="open or update the issue (WATCH)")
    options = parser.parse_args(arguments)
    try:
        return command_output(options.file) if options.command == "output" else command_report()
    except ActionError as error:
        print(f"upstream.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""GitHub Actions on this machine: repositories, events, steps, a ``gh`` that records its calls."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"
REPOSITORY, NUMBER = "octo/inkling", 7
PULL = f"repos/{REPOSITORY}/pulls/{NUMBER}"
REVIEWS = f"{PULL}/reviews?per_page=100"

# A text among the answers is printed as it is. One for `POST PATH` is the error of that call.
GH = """\
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["FAKE_GH"])
arguments = sys.argv[1:]
data = json.load(sys.stdin) if "--input" in arguments else None
method = arguments[arguments.index("--method") + 1] if "--method" in arguments else "GET"
with (folder / "calls").open("a") as file:
    print(json.dumps([method, arguments[1], data]), file=file)
answers = json.loads((folder / "answers").read_text())
if f"{method} {arguments[1]}" in answers:
    sys.exit(answers[f"{method} {arguments[1]}"])
if arguments[0] != "api" or (method == "GET" and arguments[1] not in answers):
    sys.exit("gh: Not Found (HTTP 404)")
answer = answers.get(arguments[1], {}) if method == "GET" else {}
print(answer if isinstance(answer, str) else json.dumps(answer))
"""


def make_user(login: str, number: int, kind: str = "User") -> dict[str, Any]:
    return {"login": login, "id": number, "type": kind}


OWNER = make_user("Owner", 1)


def name_permission(login: str) -> str:
    return f"repos/{REPOSITORY}/collaborators/{login}/permission"


def git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), "-c", "protocol.file.allow=always", *author, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit_files(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "c")
    return git(folder, "rev-parse", "HEAD")


def write_program(path: Path, text: str, interpreter: str = sys.executable) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{interpreter}\n{text}")
    path.chmod(0o755)


class GitHub:
    """A repository with a pull request that has one commit, a clone of its main, and the API."""

    def __init__(self, folder: Path, main: dict[str, str]):
        self.folder, self.origin, self.base = folder, folder / "origin", folder / "base"
        commit_files(self.origin, main)
        git(folder, "clone", "-q", "--depth=1", self.origin.as_uri(), str(self.base))
        # Without `site` Python starts twice as fast.
        write_program(folder / "bin/gh", GH, f"{sys.executable} -IS")
        self.answers: dict[str, Any] = {}
        self.head = ""
        self.permit(OWNER, "admin")

    def permit(self, user: dict[str, Any], permission: str, role: str | None = None) -> None:
        """Give ``user`` a permission, and a role if its name is another."""
        answer = {"permission": permission, "role_name": role or permission, "user": user}
        self.answers[name_permission(user["login"])] = answer

    def open_pull(self, files: dict[str, str]) -> None:
        """Commit ``files`` as the pull request's head; main stays where it is."""
        git(self.origin, "checkout", "-q", "--detach")
        self.head = commit_files(self.origin, files)
        git(self.origin, "update-ref", f"refs/pull/{NUMBER}/head", self.head)
        head = {"sha": self.head, "ref": "a branch", "repo": {"full_name": REPOSITORY}}
        self.answers[PULL] = {"state": "open", "head": head}

    def make_environment(self, **more: str) -> dict[str, str]:
        """What Actions sets, and ``more``; without the variables of the pytest that runs us.

        Outputs and calls of the API that came before are forgotten.
        """
        (self.folder / "answers").write_text(json.dumps(self.answers))
        (self.folder / "output").write_text("")
        (self.folder / "calls").write_text("")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB_"))}
        return {
            **kept,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "FAKE_GH": str(self.folder),
            "GITHUB_EVENT_PATH": str(self.folder / "event.json"),
            "GITHUB_OUTPUT": str(self.folder / "output"),
            "GITHUB_REPOSITORY": REPOSITORY,
            "GITHUB_RUN_ID": "42",
            "GITHUB_SERVER_URL": "https://github.example",
            **more,
        }

    def set_environment(self, patch: pytest.MonkeyPatch, **more: str) -> None:
        """Make the environment of this process that of ``make_environment``."""
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            patch.delenv(name)
        for name, value in self.make_environment(**more).items():
            patch.setenv(name, value)

    def write_event(
        self, body: str, author: str = "MEMBER", is_pull: bool = True, **fields: Any
    ) -> None:
        """Write the event of a comment, with the fields of GitHub's that the scripts read."""
        issue = {"number": NUMBER, **({"pull_request": {}} if is_pull else {})}
        comment = {"body": body, "author_association": author, "user": OWNER, **fields}
        text = json.dumps({"action": "created", "issue": issue, "comment": comment})
        (self.folder / "event.json").write_text(text)

    @property
    def outputs(self) -> dict[str, str]:
        lines = (self.folder / "output").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    @property
    def calls(self) -> list[tuple[str, str, Any]]:
        """Method, path and data of each call of the API."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [tuple(json.loads(line)) for line in lines]

    @property
    def replies(self) -> list[str]:
        end = f"issues/{NUMBER}/comments"
        return [data["body"] for _, path, data in self.calls if path.endswith(end)]

    @property
    def statuses(self) -> list[tuple[str, str]]:
        found = [(path, data) for _, path, data in self.calls if "/statuses/" in path]
        return [(path.rpartition("/")[2], data["state"]) for path, data in found]

    @property
    def contexts(self) -> list[str]:
        """The context of each status that was set."""
        return [data["context"] for _, path, data in self.calls if "/statuses/" in path]


def load_workflow(name: str) -> dict[str, Any]:
    flow: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text())
    # YAML 1.1 reads the key `on` as true.
    return {"on": flow.pop(True), **flow}


def execute(
    step: dict[str, Any], folder: Path, environment: dict[str, str], values: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a step with ``bash -e``; an expression in its ``env`` that has no value is an error."""
    own = {name: evaluate(text, values) for name, text in step.get("env", {}).items()}
    folder /= step.get("working-directory", ".")
    command = ["bash", "-e", "-c", step["run"]]
    variables = {**environment, **own}
    try:
        return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    except OSError as error:
        # A variable that is too long fails the step, as on a runner.
        return subprocess.CompletedProcess(command, 1, "", str(error))


def evaluate(text: str, values: dict[str, str]) -> str:
    """Put the values of the expressions into ``text``."""
    return re.sub(r"\$\{\{ (.+?) \}\}", lambda match: values[match[1]], text)

"""GitHub Actions on this machine: repositories, events, steps, a ``gh`` that records its calls."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"
REPOSITORY, NUMBER, RUN = "octo/inkling", 7, "42"
COMMENTED, BEFORE, AFTER = "2026-11-30T12:00:00Z", "2026-11-30T11:00:00Z", "2026-11-30T12:00:01Z"

GH = """\
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["FAKE_GH"])
arguments = sys.argv[1:]
data = json.load(sys.stdin) if "--input" in arguments else None
method = arguments[arguments.index("--method") + 1] if "--method" in arguments else "GET"
with (folder / "calls").open("a") as file:
    print(json.dumps([method, arguments[1], data]), file=file)
answers = json.loads((folder / "answers").read_text())
if arguments[0] != "api" or (method == "GET" and arguments[1] not in answers):
    sys.exit("gh: Not Found (HTTP 404)")
print(json.dumps(answers.get(arguments[1], {}) if method == "GET" else {}))
"""


def git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), "-c", "protocol.file.allow=always", *author, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def executable(path: Path, text: str, interpreter: str = sys.executable) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{interpreter}\n{text}")
    path.chmod(0o755)


class GitHub:
    """A repository with a pull request that has one commit, a clone of its main, and the API."""

    def __init__(self, folder: Path):
        self.folder, self.origin, self.base = folder, folder / "origin", folder / "base"
        self.origin.mkdir(parents=True)
        git(self.origin, "init", "-q", "-b", "main")
        self.bin, self.fake, self.output = folder / "bin", folder / "gh", folder / "output"
        executable(self.bin / "gh", GH)
        self.fake.mkdir()
        self.answers: dict[str, Any] = {}
        self.head = ""

    def commit(self) -> str:
        git(self.origin, "add", "-A")
        git(self.origin, "commit", "-q", "-m", "c")
        return git(self.origin, "rev-parse", "HEAD")

    def open_pull(self, repository: str = REPOSITORY, pushed: str = BEFORE) -> str:
        """What is in ``origin`` becomes the pull request's head, and main stays where it was."""
        git(self.origin, "checkout", "-q", "--detach")
        self.head = self.commit()
        git(self.origin, "update-ref", f"refs/pull/{NUMBER}/head", self.head)
        git(self.origin, "checkout", "-q", "main")
        git(self.folder, "clone", "-q", "--depth=1", self.origin.as_uri(), str(self.base))
        head = {"sha": self.head, "ref": "a branch", "repo": {"full_name": repository}}
        self.answers[f"repos/{REPOSITORY}/pulls/{NUMBER}"] = {"state": "open", "head": head}
        activity = f"repos/{repository}/activity?per_page=1&ref=refs%2Fheads%2Fa%20branch"
        self.answers[activity] = [{"timestamp": pushed, "after": self.head}]
        return self.head

    def environment(self, **more: str) -> dict[str, str]:
        """What Actions sets, and ``more``; nothing of a pytest that runs us."""
        (self.fake / "answers").write_text(json.dumps(self.answers))
        self.output.write_text("")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB_"))}
        return {
            **kept,
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "FAKE_GH": str(self.fake),
            "GITHUB_EVENT_PATH": str(self.folder / "event.json"),
            "GITHUB_OUTPUT": str(self.output),
            "GITHUB_REPOSITORY": REPOSITORY,
            "GITHUB_RUN_ID": RUN,
            "GITHUB_SERVER_URL": "https://github.example",
            **more,
        }

    def event(self, body: str, author: str = "MEMBER", **issue: Any) -> None:
        """The event of a comment: what GitHub sends, less what nobody here reads."""
        issue = {"number": NUMBER, "pull_request": {"url": "https://github.example"}, **issue}
        comment = {"body": body, "author_association": author, "created_at": COMMENTED}
        text = json.dumps({"action": "created", "issue": issue, "comment": comment})
        (self.folder / "event.json").write_text(text)

    def outputs(self) -> dict[str, str]:
        lines = self.output.read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def calls(self, method: str = "POST") -> list[tuple[str, Any]]:
        """Path and data of each call of a method."""
        record = self.fake / "calls"
        lines = record.read_text().splitlines() if record.exists() else []
        return [(path, data) for verb, path, data in map(json.loads, lines) if verb == method]

    def replies(self) -> list[str]:
        end = f"issues/{NUMBER}/comments"
        return [data["body"] for path, data in self.calls() if path.endswith(end)]

    def statuses(self) -> list[tuple[str, str]]:
        found = [(p, d) for p, d in self.calls() if "/statuses/" in p]
        return [(path.rpartition("/")[2], data["state"]) for path, data in found]


def copy_project(folder: Path) -> None:
    """The project's files as they are here, without what is built or downloaded."""
    left_out = shutil.ignore_patterns(".git", ".venv", ".cache", ".*_cache", "__pycache__", "docs")
    shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True, dirs_exist_ok=True)


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((WORKFLOWS / name).read_text())


def names() -> list[str]:
    return sorted(path.name for path in WORKFLOWS.iterdir())


def triggers(flow: dict[Any, Any]) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true.
    return flow[True]


def expand(text: str, values: dict[str, str]) -> str:
    """``text`` with its expressions replaced; one that has no value here is an error."""
    return re.sub(r"\$\{\{\s*(.+?)\s*\}\}", lambda match: values[match[1]], text)


def execute(
    step: dict[str, Any], folder: Path, environment: dict[str, str], values: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a step as a runner does: a script file, given to ``bash -e``, in its folder."""
    script = folder.parent / "step.sh"
    script.write_text(expand(step["run"], values))
    assert "shell" not in step
    own = {name: expand(str(text), values) for name, text in step.get("env", {}).items()}
    return subprocess.run(
        ["bash", "-e", str(script)],
        cwd=folder / step.get("working-directory", "."),
        env={**environment, **own},
        capture_output=True,
        text=True,
    )

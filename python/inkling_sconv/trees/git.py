"""Running git."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from inkling_sconv.errors import UserError

_INHERITED = ("GIT_AUTHOR_", "GIT_COMMITTER_", "GIT_CONFIG_", "GIT_EXEC_PATH")
"""The caller's variables that say who commits and how; all others, as in a hook, say where."""


class GitError(UserError):
    """git is not installed or failed. The message has the command and git's own reason."""


def run(
    folder: Path, *arguments: str, env: dict[str, str] | None = None, text: bytes | None = None
) -> bytes:
    """Return what ``git -C FOLDER ARGUMENTS`` prints; ``text`` is its standard input."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(_INHERITED)
    }
    try:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env={**inherited, **(env or {})},
            input=text or b"",
            check=True,
            capture_output=True,
        ).stdout
    except FileNotFoundError:
        raise GitError("git is not installed") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace")
        lines = [line for line in said.splitlines() if line.strip()] or ["(no message)"]
        # git prints advice before its reason, or after it.
        reason = next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[0])
        if "tell me who you are" in said:
            reason = "no author; set user.name and user.email with git config"
        raise GitError(f"git {arguments[0]} failed in {folder}: {reason.strip()}") from None


def read_line(
    folder: Path, *arguments: str, env: dict[str, str] | None = None, text: bytes | None = None
) -> str:
    """Run git, and return the one line that it prints."""
    return os.fsdecode(run(folder, *arguments, env=env, text=text)).rstrip("\n")


def find_git_path(checkout: Path, name: str) -> Path:
    """Find ``name`` in the git directory of ``checkout``, which may be a worktree."""
    show = ("rev-parse", "--path-format=absolute", "--git-path", name)
    return Path(read_line(checkout, *show))


def find_checkout(path: Path) -> Path | None:
    """Find the top of the checkout that tracks ``path``; None without a checkout or git."""
    try:
        run(path.parent, "ls-files", "--error-unmatch", path.name)
        return Path(read_line(path.parent, "rev-parse", "--show-toplevel"))
    except GitError:
        return None


def find_git_folders(path: Path) -> Iterator[tuple[Path, Path]]:
    """Find the tops of the checkouts around ``path`` and their git directories, innermost first.

    This reads files alone: it needs no git, and does not mind who owns the checkout.
    """
    for top in path.parents:
        folder = top / ".git"
        if folder.is_file():
            # A worktree or a submodule.
            folder = top / os.fsdecode(folder.read_bytes().removeprefix(b"gitdir:").strip())
        if os.path.lexists(folder / "HEAD"):
            yield top, folder

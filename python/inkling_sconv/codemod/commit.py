"""The edit as a commit: a mailbox patch, or a branch. Working tree and index stay as they are."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from inkling_sconv.trees import git

# Not "[Fix] ...": git am strips brackets off a subject.
SUBJECT = "Fix Inkling draft-extend capture without prefix lengths"
# Pin format options that a user's git configuration could change.
FORMAT = (
    *("--no-signature", "--no-cover-letter", "--no-attach", "--unified=3"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
BODY = """\
Problem: with MTP (--speculative-algorithm EAGLE --enable-multi-layer-eagle) the server dies while
it captures its draft-extend graphs:

    AttributeError: 'NoneType' object has no attribute 'shape'
      _refresh_track_conv_indices

Cause: the batch of a capture is built directly, not through ForwardBatch.init_new, so its
extend_prefix_lens is None. Since #34043 the graph path no longer returns early: it fills inert
track fields, so that the capture records the checkpoint scatter. It then reads the missing field.

Fix: on the graph path, and only there, use zeros where prefix lengths are missing. No row of such a
batch is tracked, so the values only keep the indices in bounds. A live batch without prefix lengths
still fails: a made-up prefix would checkpoint the wrong window. Same behaviour as #35042.

How to test: `inkling-sconv doctor .` on a machine without a GPU; or start the server with MTP and
CUDA graphs on.
"""


def make_mailbox(path: Path, edit: Callable[[bytes], bytes], fallback: Path) -> bytes | None:
    """Make a patch of ``edit`` for ``git am``.

    In a git checkout that tracks ``path``, the patch is for HEAD: it leaves out what is not
    committed. Elsewhere it is for the file as it is, under the name ``fallback``.

    Returns:
        The patch; None if ``edit`` changes nothing.

    Raises:
        GitError: git is missing, knows no author (user.name, user.email), or fails.
    """
    with tempfile.TemporaryDirectory(prefix="inkling-sconv-") as folder:
        repository = git.find_checkout(path)
        env: dict[str, str] = {}
        if repository is None:
            repository, name = Path(folder), fallback.as_posix()
            git.run(repository, "init", "-q")
            parent = _make_commit(repository, name, path.read_bytes(), None, "before", env)
        else:
            name = _name_in_repository(repository, path)
            parent = git.read_line(repository, "rev-parse", "HEAD")
            # New objects go to a folder of their own: the repository stays as it is.
            theirs = git.find_git_path(repository, "objects")
            env = {"GIT_OBJECT_DIRECTORY": folder, "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(theirs)}
        made = _commit_edit(repository, name, parent, edit, env)
        if made is None:
            return None
        return git.run(repository, "format-patch", "-1", "--stdout", *FORMAT, made, env=env)


def make_branch(path: Path, edit: Callable[[bytes], bytes], name: str, base: str) -> str | None:
    """Make the branch ``name``: one commit with the edit of ``path`` on top of ``base``.

    Returns:
        The new commit's id; None if ``edit`` changes nothing, and then there is no branch.

    Raises:
        GitError: no git checkout tracks ``path``, ``base`` is not a commit that has it, the branch
            is there already, or git fails.
    """
    repository = git.find_checkout(path)
    if repository is None:
        raise git.GitError(f"{path}: --branch needs a git checkout that tracks the file")
    git.run(repository, "check-ref-format", "--branch", name)
    try:
        parent = git.read_line(
            repository, "rev-parse", "--verify", "--end-of-options", f"{base}^{{commit}}"
        )
    except git.GitError:
        # git's own message omits the name.
        raise git.GitError(f"{base}: no commit of that name in {repository}") from None
    made = _commit_edit(repository, _name_in_repository(repository, path), parent, edit, {})
    if made is not None:
        git.run(repository, "branch", name, made)
    return made


def has_uncommitted_edits(path: Path) -> bool:
    """Whether git tracks ``path`` and it differs from HEAD, in the index or the working tree."""
    repository = git.find_checkout(path)
    return repository is not None and bool(
        git.run(repository, "status", "--porcelain", "--", str(path.resolve()))
    )


def _name_in_repository(repository: Path, path: Path) -> str:
    return path.resolve().relative_to(repository.resolve()).as_posix()


def _commit_edit(
    repository: Path,
    name: str,
    parent: str,
    edit: Callable[[bytes], bytes],
    env: dict[str, str],
) -> str | None:
    """Commit the edit of ``parent``'s file ``name``; None if it changes nothing."""
    before = git.run(repository, "cat-file", "blob", f"{parent}:{name}", env=env)
    after = edit(before)
    if after == before:
        return None
    return _make_commit(repository, name, after, parent, f"{SUBJECT}\n\n{BODY}", env)


def _make_commit(
    repository: Path,
    name: str,
    text: bytes,
    parent: str | None,
    message: str,
    env: dict[str, str],
) -> str:
    """Commit ``parent``'s tree with ``text`` as the file ``name``, in an index of its own."""
    with tempfile.TemporaryDirectory(prefix="inkling-sconv-") as folder:
        env = {**env, "GIT_INDEX_FILE": str(Path(folder) / "index")}
        mode, parents = "100644", []
        if parent is not None:
            git.run(repository, "read-tree", parent, env=env)
            mode = git.read_line(repository, "ls-tree", parent, "--", name, env=env).split()[0]
            parents = ["-p", parent]
        # No filters: ``text`` was made from a blob, where autocrlf is undone already.
        write = ("hash-object", "-w", "--no-filters", "--stdin")
        blob = git.read_line(repository, *write, env=env, text=text)
        entry = f"{mode},{blob},{name}"
        git.run(repository, "update-index", "--add", "--cacheinfo", entry, env=env)
        tree = git.read_line(repository, "write-tree", env=env)
        commit = ("commit-tree", tree, *parents, "-F", "-")
        return git.read_line(repository, *commit, env=env, text=message.encode())

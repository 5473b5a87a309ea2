"""Find new SGLang releases, and classify each.

Only pip uses the network, with the index, proxies and certificates it is configured for.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from inkling_sconv.errors import UserError, make_line
from inkling_sconv.trees.examine import examine_tree
from inkling_sconv.trees.tree import AbsentError, open_tree

PACKAGE = "sglang"
KNOWN = {
    "0.5.17": "untracked",
    "0.5.18": "guarded",
    "0.5.19": "guarded",
    "0.5.20": "guarded",
    "0.5.21": "guarded",
    "0.5.22": "exempt",
    "0.5.23": "exempt",
}
"""States of the tested releases. A person adds a row once the tests pass on that release."""

INDEX_SECONDS, DOWNLOAD_SECONDS = 120, 600
_LONGEST_REASON = 300
_NEXT = """\
Next: `pip download --no-deps sglang==VERSION` and `inkling-sconv doctor WHEEL`. Then add the
version to `KNOWN` in `python/inkling_sconv/trees/watch.py`, to `STATES` in
`test/unit/test_releases.py` and to `RELEASES` in `test/releases.py`, and run `make test`."""

ReadState = Callable[[bytes], str]
"""Tells the state of a file from its syntax tree."""


class WatchError(UserError):
    """``watch`` cannot tell what is new. The message says what failed, and what to do."""


@dataclass(frozen=True)
class Release:
    """A release. It is ``new`` if its ``state`` differs from what is ``known`` from the table.

    ``why``: why its class could not be run. ``static``: then the state by its syntax tree.
    """

    version: str
    state: str
    known: str | None
    new: bool
    why: str = ""
    static: str = ""


@dataclass(frozen=True)
class Answer:
    """Whether anything is new, and the title and body of an issue about it."""

    new: bool
    title: str
    body: str
    releases: tuple[Release, ...]


def look_for_releases(
    read_state: ReadState, report_progress: Callable[[str], None], release: str | None = None
) -> Answer:
    """Examine every release newer than those in the table, or only ``release``.

    ``read_state`` is used if a release's class cannot be run, or is unknown.

    Raises:
        WatchError: the index does not answer, or there is no such release.
    """
    newest_known = max(KNOWN, key=Version)
    if release is not None:
        try:
            versions = [Version(release)]
        except InvalidVersion:
            raise WatchError(f"--release {release!r}: not a version, such as 0.5.23") from None
    else:
        done = _run_pip("index", "versions", PACKAGE, "--pre", seconds=INDEX_SECONDS)
        if done.returncode:
            raise WatchError(f"pip index versions {PACKAGE}: {_find_reason(done)}; run pip by hand")
        found = read_versions(done.stdout)
        versions = sorted(version for version in found if version > Version(newest_known))
        if not versions:
            body = f"The newest that pip finds is {max(found)}."
            return Answer(False, f"No SGLang is newer than {newest_known}", body, ())
    releases = tuple(_examine_release(v, read_state, report_progress) for v in versions)
    new = any(release.new for release in releases)
    # If any differ from what was known, the title is about the newest of them.
    changed = [r for r in releases if r.state != (r.known or KNOWN[newest_known])]
    last = (changed or releases)[-1]
    table = "the table says" if last.known else f"{newest_known} was"
    title = f"SGLang {last.version} is {last.state}; {table} {last.known or KNOWN[newest_known]}"
    return Answer(new, title, _format_body(releases, new), releases)


def read_versions(answer: str) -> list[Version]:
    """Read the versions in what ``pip index versions`` prints.

    Names that are not versions by PEP 440 are left out.

    Raises:
        WatchError: it prints no version.
    """
    line = re.search(r"^Available versions: (.+)$", answer, re.MULTILINE)
    found = []
    for text in line[1].split(",") if line else ():
        with contextlib.suppress(InvalidVersion):
            found.append(Version(text))
    if not found:
        raise WatchError(
            f"pip index versions {PACKAGE}: its answer names no version: {answer[:80]!r}; "
            "upgrade pip, or name one with --release"
        )
    return found


def examine_wheel(wheel: Path, read_state: ReadState) -> dict[str, Any]:
    """Examine a wheel.

    Returns:
        ``state``; ``why``, if it is absent or unknown; ``static``, if unknown: by its syntax tree.
    """
    with open_tree(wheel) as tree:
        try:
            report = examine_tree(tree, installed=False)
            if report["state"] != "unknown":
                return report
            return {**report, "static": read_state(tree.backend.read_bytes())}
        except UserError as error:
            state = "absent" if isinstance(error, AbsentError) else "unknown"
            return {"state": state, "why": str(error).removeprefix(f"{tree.root}: ")}


def _examine_release(
    version: Version, read_state: ReadState, report_progress: Callable[[str], None]
) -> Release:
    requirement = f"{PACKAGE}=={version}"
    with tempfile.TemporaryDirectory(prefix="inkling-sconv-") as folder:
        report_progress(f"{requirement}: downloading")
        arguments = ("--no-deps", "--only-binary=:all:", "--dest", folder, requirement)
        done = _run_pip("download", *arguments, seconds=DOWNLOAD_SECONDS)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            if "No matching distribution" in done.stderr:
                raise WatchError(
                    f"{requirement}: pip finds no such release for this Python; "
                    f"see: pip index versions {PACKAGE} --pre"
                )
            raise WatchError(f"{requirement}: not downloaded ({_find_reason(done)}); try later")
        report_progress(f"{requirement}: running its class")
        report = examine_wheel(wheels[0], read_state)
    state, known = report["state"], KNOWN.get(str(version))
    why = _shorten(report.get("why", ""))
    return Release(str(version), state, known, state != known, why, report.get("static", ""))


def _format_body(releases: Sequence[Release], new: bool) -> str:
    lines = ["| SGLang | state | in the table | |", "|---|---|---|---|"]
    for release in releases:
        notes = []
        if release.why:
            # The wheel's own words: untrusted. In a code span they cannot be markup.
            notes.append("`" + release.why.replace("`", "'").replace("|", "/") + "`")
        if release.static:
            notes.append(f"from the syntax tree alone: {release.static}")
        cells = (release.version, release.state, release.known or "no", "; ".join(notes))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _NEXT] if new else lines)


def _run_pip(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--no-input", *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise WatchError(
            f"pip {arguments[0]}: no answer in {seconds:.0f} s; check the network, and try again"
        ) from None


def _find_reason(done: subprocess.CompletedProcess[str]) -> str:
    """Find why pip failed: the last line with an error, not the list of all versions."""
    if "No module named pip" in done.stderr:
        return f"pip is not installed for {sys.executable}: python -m ensurepip"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    return _shorten(errors[-1].removeprefix("ERROR:") if errors else f"exit {done.returncode}")


def _shorten(text: str) -> str:
    text = make_line(" ".join(text.split()))
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."

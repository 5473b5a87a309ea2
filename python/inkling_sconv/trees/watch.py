"""Looking for newer SGLang releases, and at what each does in its refresh.

Only pip uses the network, with the index, proxies and certificates it is configured for.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from inkling_sconv.errors import UserError
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
    """It cannot be told what is new. The message says what failed, and what to do."""


@dataclass(frozen=True)
class Release:
    """A release's state as found and as in the table.

    A release that could not be run has the reason in ``why``, and its syntax tree's state in
    ``static``.
    """

    version: str
    state: str
    known: str | None
    why: str = ""
    static: str = ""

    @property
    def new(self) -> bool:
        """Whether the table lacks the release, or has another state for it."""
        return self.state != self.known


@dataclass(frozen=True)
class Answer:
    """Whether anything is new, and the title and body of an issue about it."""

    new: bool
    title: str
    body: str
    releases: tuple[Release, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for ``--json``."""
        releases = [{**asdict(release), "new": release.new} for release in self.releases]
        return {**asdict(self), "releases": releases}


def look_for_releases(
    read_state: ReadState, report_progress: Callable[[str], None], release: str | None = None
) -> Answer:
    """Examine every release newer than those in the table, or only ``release``.

    ``read_state`` is asked about a release whose class cannot be run.

    Raises:
        WatchError: the index does not answer, or there is no such release.
    """

    def examine(version: Version) -> Release:
        return _examine_release(version, read_state, report_progress)

    newest_known = max(KNOWN, key=Version)
    if release is not None:
        return _summarise([examine(_parse_version(release))], newest_known, asked=True)
    found = list_versions()
    newer = [version for version in found if version > Version(newest_known)]
    if not newer:
        newest = [
            max((v for v in found if v.is_prerelease is candidate), default=None)
            for candidate in (True, False)
        ]
        states = {str(v): KNOWN.get(str(v), "older than the table") for v in newest if v}
        return _summarise([Release(v, state, state) for v, state in states.items()], newest_known)
    return _summarise([examine(version) for version in sorted(newer)], newest_known)


def list_versions() -> list[Version]:
    """List every version of SGLang that pip finds, release candidates too.

    Raises:
        WatchError: pip finds no version, or fails.
    """
    command = ("index", "versions", PACKAGE, "--pre")
    done = _run_pip(*command, "--json", seconds=INDEX_SECONDS)
    if done.returncode and "no such option: --json" in done.stderr:
        done = _run_pip(*command, seconds=INDEX_SECONDS)
    if done.returncode:
        raise WatchError(f"pip index versions {PACKAGE}: {_find_reason(done)}; ask pip by hand")
    return read_versions(done.stdout)


def read_versions(answer: str) -> list[Version]:
    """Read the versions in what ``pip index versions`` prints, as JSON or as text.

    Old names that are no versions by today's rules are left out.

    Raises:
        WatchError: it prints no version.
    """
    listed: Sequence[Any] = ()
    if answer.lstrip().startswith("{"):
        try:
            listed = json.loads(answer).get("versions") or ()
        except (ValueError, AttributeError):
            listed = ()
    elif line := re.search(r"^Available versions: (.+)$", answer, re.MULTILINE):
        listed = line[1].split(",")
    found = []
    for text in listed:
        try:
            found.append(Version(str(text)))
        except InvalidVersion:
            continue
    if not found:
        raise WatchError(
            f"pip index versions {PACKAGE}: its answer names no version: {answer[:80]!r}; "
            "upgrade pip, or name one with --release"
        )
    return found


def _parse_version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise WatchError(f"--release {text!r}: not a version; write it like 0.5.23") from None


def examine_wheel(wheel: Path, read_state: ReadState) -> dict[str, Any]:
    """Examine a wheel.

    Returns:
        ``state``; ``why``, if it is absent or unknown; ``static``, the state by its syntax tree, if
        the class is there but could not be run.
    """
    with open_tree(wheel) as tree:
        try:
            report = examine_tree(tree, installed=False)
            if report["state"] != "unknown":
                return report
            broken = [row["seen"] for row in report["rows"] if row["verdict"] == "broken"]
            static = read_state(tree.backend.read_bytes())
            return {"why": "; ".join(broken), **report, "static": static}
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
            raise WatchError(
                f"{requirement}: not downloaded ({_find_reason(done)}); try again later"
            )
        report_progress(f"{requirement}: running its class")
        report = examine_wheel(wheels[0], read_state)
    return Release(
        str(version),
        report["state"],
        KNOWN.get(str(version)),
        _shorten(report.get("why", "")),
        report.get("static", ""),
    )


def _summarise(releases: list[Release], newest_known: str, asked: bool = False) -> Answer:
    new = any(release.new for release in releases)
    last = releases[-1]
    if not new and asked:
        title = f"SGLang {last.version} is {last.state}, as the table says"
    elif not new:
        title = f"No SGLang is newer than {newest_known}"
    elif last.state == "unknown":
        title = f"SGLang {last.version} is not recognised"
    elif last.known is not None:
        title = f"SGLang {last.version} is {last.state}; the table says {last.known}"
    elif last.state != KNOWN[newest_known]:
        was = KNOWN[newest_known]
        title = f"SGLang {last.version} is {last.state}; {newest_known} was {was}"
    else:
        title = f"SGLang {last.version} is {last.state}, as {newest_known} was"
    return Answer(new, title, _format_body(releases, new), tuple(releases))


def _format_body(releases: list[Release], new: bool) -> str:
    lines = ["| SGLang | state | in the table | |", "|---|---|---|---|"]
    for release in releases:
        notes = []
        if release.why:
            # The wheel chose these words. In a code span they cannot be markup.
            notes.append("`" + release.why.replace("`", "'").replace("|", "/") + "`")
        if release.static:
            notes.append(f"from the syntax tree alone: {release.static}")
        cells = (release.version, release.state, release.known or "no", "; ".join(notes))
        lines.append(f"| {' | '.join(cells)} |")
    if new:
        lines += ["", _NEXT]
    return "\n".join(lines)


def _run_pip(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--no-input", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
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
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."

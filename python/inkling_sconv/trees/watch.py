"""Whether a newer SGLang changes the refresh: the releases that pip finds, and their states.

The network is pip's alone: its configured index, its proxies, its certificates.
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
"""States of the releases that were looked at. A row is added by hand, after its tests passed."""

INDEX_SECONDS, DOWNLOAD_SECONDS = 120, 600
_LONGEST_REASON = 300
_NEXT = """\
Next: `pip download --no-deps sglang==VERSION` and `inkling-sconv doctor WHEEL`. Then add the
version to `KNOWN` in `python/inkling_sconv/trees/watch.py`, to `STATES` in
`test/unit/test_releases.py` and to `RELEASES` in `test/releases.py`, and run `make test`."""

Examine = Callable[[Path], dict[str, Any]]
"""What ``doctor`` reports of a wheel: ``state``, where there is one ``why``, and ``static``, the
state that the syntax tree has where the class could not be driven."""


class WatchError(UserError):
    """Nobody can tell what is new: what failed, and what to do."""


@dataclass(frozen=True)
class Release:
    """One release as it was found, and what the table says of it."""

    version: str
    state: str
    known: str | None
    why: str = ""
    static: str = ""

    @property
    def new(self) -> bool:
        """Whether the table has another state for it, or none; unknown is in no table."""
        return self.state != self.known


@dataclass(frozen=True)
class Answer:
    """What is new, worded for an issue."""

    new: bool
    title: str
    body: str
    releases: tuple[Release, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        releases = [{**asdict(release), "new": release.new} for release in self.releases]
        return {**asdict(self), "releases": releases}


def look_for_releases(
    examine: Examine, say: Callable[[str], None], release: str | None = None
) -> Answer:
    """Look at every release newer than the table, or at ``release`` alone.

    ``say`` is told what is at work.

    Raises:
        WatchError: the index does not answer, or there is no such release.
    """
    newest_known = max(KNOWN, key=Version)
    if release is not None:
        version = _version(release)
        return _answer([_look(version, examine, say)], newest_known, asked=True)
    found = list_versions()
    newer = [version for version in found if version > Version(newest_known)]
    if not newer:
        newest = [
            max((v for v in found if v.is_prerelease is candidate), default=None)
            for candidate in (True, False)
        ]
        states = {str(v): KNOWN.get(str(v), "older than the table") for v in newest if v}
        return _answer([Release(v, state, state) for v, state in states.items()], newest_known)
    return _answer([_look(version, examine, say) for version in sorted(newer)], newest_known)


def list_versions() -> list[Version]:
    """Every version of SGLang that pip finds, release candidates too.

    Raises:
        WatchError: pip finds none, or cannot ask.
    """
    command = ("index", "versions", PACKAGE, "--pre")
    done = _pip(*command, "--json", seconds=INDEX_SECONDS)
    if done.returncode and "no such option: --json" in done.stderr:
        done = _pip(*command, seconds=INDEX_SECONDS)
    if done.returncode:
        raise WatchError(f"pip index versions {PACKAGE}: {_reason(done)}; ask pip by hand")
    return read_versions(done.stdout)


def read_versions(answer: str) -> list[Version]:
    """The versions in what ``pip index versions`` prints, as JSON or as text.

    What is no version by today's rules is left out.

    Raises:
        WatchError: none is in it.
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


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise WatchError(f"--release {text!r}: not a version; write it like 0.5.23") from None


def _look(version: Version, examine: Examine, say: Callable[[str], None]) -> Release:
    requirement = f"{PACKAGE}=={version}"
    with tempfile.TemporaryDirectory(prefix="inkling-sconv-") as folder:
        say(f"{requirement}: downloading")
        arguments = ("--no-deps", "--only-binary=:all:", "--dest", folder, requirement)
        done = _pip("download", *arguments, seconds=DOWNLOAD_SECONDS)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            if "No matching distribution" in done.stderr:
                raise WatchError(
                    f"{requirement}: pip finds no such release for this Python; "
                    f"see: pip index versions {PACKAGE} --pre"
                )
            raise WatchError(f"{requirement}: not downloaded ({_reason(done)}); try again later")
        say(f"{requirement}: asking its class")
        report = examine(wheels[0])
    return Release(
        str(version),
        report["state"],
        KNOWN.get(str(version)),
        _short(report.get("why", "")),
        report.get("static", ""),
    )


def _answer(releases: list[Release], newest_known: str, asked: bool = False) -> Answer:
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
    return Answer(new, title, _body(releases, new), tuple(releases))


def _body(releases: list[Release], new: bool) -> str:
    lines = ["| SGLang | state | in the table | |", "|---|---|---|---|"]
    for release in releases:
        notes = []
        if release.why:
            # A wheel's own words: in code, so that they cannot be markup.
            notes.append("`" + release.why.replace("`", "'").replace("|", "/") + "`")
        if release.static:
            notes.append(f"from the syntax tree alone: {release.static}")
        cells = (release.version, release.state, release.known or "no", "; ".join(notes))
        lines.append(f"| {' | '.join(cells)} |")
    if new:
        lines += ["", _NEXT]
    return "\n".join(lines)


def _pip(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--no-input", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise WatchError(
            f"pip {arguments[0]}: no answer in {seconds:.0f} s; check the network, and try again"
        ) from None


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Why pip failed: the last line that says so, not the list of every version that it knows."""
    if "No module named pip" in done.stderr:
        return f"pip is not installed for {sys.executable}: python -m ensurepip"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    return _short(errors[-1].removeprefix("ERROR:") if errors else f"exit {done.returncode}")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."

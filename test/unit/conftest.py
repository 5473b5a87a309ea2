"""Fixtures that run ``test/drive.py`` in SGLang trees, and where xdist runs a tree's tests."""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_server
import kernel_tools
import pytest
import releases
from inkling_sconv.proof import server

TEST = Path(__file__).resolve().parent.parent


class Tree:
    """A process of ``test/drive.py`` in one tree of ``releases.TREES``."""

    def __init__(self, name: str, folder: Path):
        self.log, tree = (folder / "log").open("w+"), releases.tree(name, folder / "tree")
        self.process = subprocess.Popen(
            [sys.executable, str(TEST / "drive.py")],
            env=releases.environment(tree, name, SGLANG_PLUGINS="inkling_sconv"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def play(
        self, scenario: str, mode: str | None, file: Path | None, **variables: str
    ) -> dict[str, Any]:
        environment = variables if mode is None else {"INKLING_SCONV": mode, **variables}
        job = {"scenario": scenario, "environment": environment, "file": file and str(file)}
        try:
            print(json.dumps(job), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        result = json.loads(answer or '{"error": "test/drive.py died"}')
        if "error" in result:
            self.log.seek(0)
            pytest.fail(f"{result['error']}\n{self.log.read()[-4000:]}", pytrace=False)
        return result


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Tree]]:
    """Gives a tree by its name. Each is started when a test first asks for it."""
    started: dict[str, Tree] = {}

    def get(name: str) -> Tree:
        if name not in started:
            started[name] = Tree(name, tmp_path_factory.mktemp("tree"))
        return started[name]

    yield get
    for tree in started.values():
        tree.process.kill()
        tree.process.wait()


@pytest.fixture
def drive(trees: Callable[[str], Tree], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Plays a scenario of ``test/drive.py`` in a tree, or in a fork of it with another text."""

    def _drive(
        name: str, scenario: str, mode: str | None = None, text: str | None = None, **variables: str
    ) -> dict[str, Any]:
        if text is not None:
            (tmp_path / releases.BACKEND.name).write_text(text)
        return trees(name).play(scenario, mode, None if text is None else tmp_path, **variables)

    return _drive


@pytest.fixture(scope="module", params=kernel_tools.DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def marker() -> Iterator[str]:
    """In the environment of every fake server of a test. All of them are gone after it."""
    mark = f"FAKE_SERVER_OF_{os.getpid()}_{time.monotonic_ns()}"
    yield mark
    assert fake_server.find_marked(mark) == []


@pytest.fixture
def start(marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(server, "GRACE_SECONDS", 1)
    return functools.partial(fake_server.make_server, tmp_path, marker)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Send all tests of a tree to one xdist worker, so that SGLang is imported once for them."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        name = callspec.params.get("tree") if callspec else None
        if name is None and "drive" in getattr(item, "fixturenames", ()):
            name = releases.CRASHING
        if name is not None:
            item.add_marker(pytest.mark.xdist_group(name))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the tables that tests attach to their reports, from xdist workers too."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for text in (value for name, value in report.user_properties if name == "table"):
            terminalreporter.write_line(f"\n{text}")

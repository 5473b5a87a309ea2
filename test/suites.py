"""SGLang's own Inkling suites, unchanged, around our plugin: ``python test/suites.py CHECKOUT``.

The suites and the SGLang that they test are the checkout's. Nothing is written into it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import shards

SUITES = (
    "test_unified_radix_cache_kl_hybrid_bitexact.py",
    "test_inkling.py",
    "test_inkling_small_nvfp4.py",
)
# With it, from PATH, the suites start their servers.
COMMAND = "sglang"
MODEL, REVISION = "INKLING_TEST_MODEL_PATH", "INKLING_TEST_MODEL_REVISION"
TINY = (
    "tiny: a case that sends token ids above 2047, or asks for other than 48 prompts, fails on it"
)


class NoRunError(RuntimeError):
    """The suites cannot be run. The message is one line for the user."""


def checkout(name: str) -> Path:
    """The folder of a checkout of SGLang.

    Raises:
        NoRunError: it is none.
    """
    if not name:
        raise NoRunError("SGLANG_DIR=... is to name your checkout of SGLang")
    folder = Path(name).expanduser().resolve()
    if not folder.is_dir():
        raise NoRunError(f"SGLANG_DIR={name}: no such folder")
    for part in ("python/sglang", "test"):
        if not (folder / part).is_dir():
            raise NoRunError(f"SGLANG_DIR={name}: no checkout of SGLang: it has no {part}")
    return folder


def find(folder: Path) -> dict[str, list[Path]]:
    """The files of each name of ``SUITES`` under the checkout's ``test``."""
    return {name: sorted((folder / "test").rglob(name)) for name in SUITES}


def environment(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Variables with which tests and servers run the checkout's SGLang and our package."""
    paths = (folder / "python", shards.ROOT / "python", variables.get("PYTHONPATH", ""))
    commands = (Path(sys.executable).parent, variables.get("PATH", ""))
    return {
        "INKLING_SCONV": "auto",
        **variables,
        "PYTHONPATH": os.pathsep.join(filter(None, map(str, paths))),
        # A Python that make was given need not be the one that is first there.
        "PATH": os.pathsep.join(filter(None, map(str, commands))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run(folder: Path, variables: Mapping[str, str], logs: Path) -> int:
    """Run the suites that are there, and say what each came to; 1 if one failed.

    Raises:
        NoRunError: none is there, or what they need is not.
    """
    found = find(folder)
    for name, files in found.items():
        places = ", ".join(str(file.relative_to(folder)) for file in files)
        print(f"{'found' if files else 'not found'}: {places or name}", flush=True)
    if not any(found.values()):
        raise NoRunError(f"{folder / 'test'} has none of the suites")
    env = environment(folder, variables)
    if shutil.which(COMMAND, path=env["PATH"]) is None:
        beside = f"beside {sys.executable} or on PATH"
        raise NoRunError(f"no command {COMMAND} {beside}: the suites start their servers with it")
    if url := _taken(env):
        raise NoRunError(f"{url} answers already: the suites would test that, not their own server")
    with contextlib.ExitStack() as stack:
        note = ""
        if not env.get(MODEL):
            # A folder has no revisions.
            env |= {MODEL: str(_checkpoint(stack, env)), REVISION: ""}
            note = f", {TINY}"
        print(f"checkpoint: {env[MODEL]}{note}", flush=True)
        lines = [
            _outcome(folder, file, env, logs / f"upstream-{file.stem}-{place}.xml")
            for files in found.values()
            for place, file in enumerate(files, 1)
        ]
    # After everything that pytest had to say, the last line of which may not be ended.
    print("", *lines, sep="\n", flush=True)
    return int(any(line.startswith("failed") for line in lines))


def _checkpoint(stack: contextlib.ExitStack, env: Mapping[str, str]) -> Path:
    """A tiny checkpoint, and beside it the prompts for SGLang's KL helpers; both until the end."""
    out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inkling-sconv-"))) / "tiny"
    # Where the prompts go is for the checkout's SGLang to say, and this process may have another.
    command = [sys.executable, "-m", "inkling_sconv.tiny", str(out), "--kl-prompts"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise NoRunError((done.stderr.strip().splitlines() or ["no checkpoint was written"])[-1])
    stack.callback(Path(done.stdout.splitlines()[-1]).unlink, missing_ok=True)
    return out


def _taken(env: Mapping[str, str]) -> str | None:
    """The URL of the suites' servers, if something listens there already.

    They share one port, and take whatever answers there for theirs. A checkout that does not say
    which port it is cannot run its suites either.
    """
    code = "from sglang.test.test_utils import DEFAULT_URL_FOR_TEST as url; print('url:', url)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    said = re.search(r"^url: (http://\S+)$", done.stdout, re.MULTILINE)
    # No port in it, or none that can be, is a ValueError.
    with contextlib.suppress(OSError, ValueError):
        place = urlsplit(said.group(1) if said else "")
        if place.hostname and place.port:
            socket.create_connection((place.hostname, place.port), 5).close()
            return place.geturl()
    return None


def _divergences(junit: Path) -> Iterator[str]:
    """The averages of KL divergence that SGLang's helpers printed, test by test."""
    for case in ET.parse(junit).iter("testcase"):
        found = re.findall(r"^avg_kl_div=(\S+)$", case.findtext("system-out", ""), re.MULTILINE)
        if found:
            name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
            yield f"  {name}: avg_kl_div {', '.join(found)}"


def _outcome(folder: Path, file: Path, env: Mapping[str, str], junit: Path) -> str:
    """Runs one suite; passed, failed or skipped, and what of it, in lines."""
    junit.unlink(missing_ok=True)
    name = file.relative_to(folder)
    print(f"running: {name}", flush=True)
    # Not this repository's pytest settings, nor a cache in the user's checkout.
    options = ("-p", "no:cacheprovider", f"--rootdir={folder}", f"--junit-xml={junit}", "-v")
    options += ("-o", "junit_logging=system-out")
    command = [sys.executable, "-m", "pytest", str(file), *options]
    code = subprocess.run(command, cwd=file.parent, env=env).returncode
    counts = shards.counts(junit)
    if counts is None:
        return f"failed: {name}: no JUnit file, exit {code}"
    passed, failed, skipped = counts[1:]
    # pytest exits with 5 where it found no test; a suite whose tests are all skipped did not run.
    verdict = "failed" if code or failed else "passed" if passed else "skipped"
    line = f"{verdict}: {name}: {passed} passed, {failed} failed, {skipped} skipped, {junit}"
    return "\n".join((line, *_divergences(junit)))


def main(arguments: Sequence[str]) -> int:
    try:
        folder = checkout(arguments[0] if arguments else "")
        lacking = shards.missing()
        if lacking is not None:
            raise NoRunError(lacking)
        env = environment(folder, os.environ)
        # One line: what the plugin does to this SGLang, or why it is not asked.
        state = subprocess.run(
            [sys.executable, "-m", "inkling_sconv"], env=env, capture_output=True, text=True
        )
        if state.returncode:
            said = state.stderr.strip().splitlines() or ["the plugin's state is unknown"]
            raise NoRunError(said[-1])
        print(state.stdout.strip(), flush=True)
        return run(folder, os.environ, shards.folder_of_logs())
    except NoRunError as error:
        print(f"upstream-suites: {error}", file=sys.stderr)
    except OSError as error:
        print(f"upstream-suites: {error.filename}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``make upstream-suites``: SGLang's own Inkling suites, unchanged, with our plugin.

    python test/suites.py CHECKOUT

The suites and the SGLang that they test are the checkout's. Nothing is written into it. They get
the tiny checkpoint unless ``INKLING_TEST_MODEL_PATH`` names another.
"""

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

import gpu_test
from inkling_sconv.errors import UserError

SUITES = (
    "test_unified_radix_cache_kl_hybrid_bitexact.py",
    "test_inkling.py",
    "test_inkling_small_nvfp4.py",
)
# The suites start their servers with this command, from PATH.
COMMAND = "sglang"
MODEL, REVISION = "INKLING_TEST_MODEL_PATH", "INKLING_TEST_MODEL_REVISION"
TINY = (
    "tiny: a case that sends token ids above 2047, or asks for other than 48 prompts, fails on it"
)


def find_checkout(name: str) -> Path:
    """The folder of a checkout of SGLang.

    Raises:
        UserError: it is not one.
    """
    if not name:
        raise UserError("name your checkout of SGLang with SGLANG_DIR=...")
    folder = Path(name).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"SGLANG_DIR={name}: no such folder")
    for part in ("python/sglang", "test"):
        if not (folder / part).is_dir():
            raise UserError(f"SGLANG_DIR={name}: not a checkout of SGLang: it has no {part}")
    return folder


def make_environment(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Variables with which tests and servers run the checkout's SGLang and our package."""
    paths = (folder / "python", gpu_test.ROOT / "python", variables.get("PYTHONPATH", ""))
    commands = (Path(sys.executable).parent, variables.get("PATH", ""))
    return {
        "INKLING_SCONV": "auto",
        **variables,
        "PYTHONPATH": os.pathsep.join(filter(None, map(str, paths))),
        # The Python that make was given may not be the first one there.
        "PATH": os.pathsep.join(filter(None, map(str, commands))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run(folder: Path, variables: Mapping[str, str], logs: Path) -> int:
    """Run every suite that the checkout has, and print each one's outcome; 1 if one failed.

    Raises:
        UserError: the checkout has no suite, or something that they need is missing.
    """
    found = {name: sorted((folder / "test").rglob(name)) for name in SUITES}
    for name, files in found.items():
        places = ", ".join(str(file.relative_to(folder)) for file in files)
        print(f"{'found' if files else 'not found'}: {places or name}", flush=True)
    if not any(found.values()):
        raise UserError(f"{folder / 'test'} has none of the suites")
    env = make_environment(folder, variables)
    if shutil.which(COMMAND, path=env["PATH"]) is None:
        beside = f"beside {sys.executable} or on PATH"
        raise UserError(f"no command {COMMAND} {beside}: the suites start their servers with it")
    if url := find_other_server(env):
        raise UserError(f"{url} answers already: the suites would test that, not their own server")
    with contextlib.ExitStack() as stack:
        note = ""
        if not env.get(MODEL):
            # A folder has no revisions.
            env |= {MODEL: str(_make_checkpoint(stack, env)), REVISION: ""}
            note = f", {TINY}"
        print(f"checkpoint: {env[MODEL]}{note}", flush=True)
        lines = [
            _run_suite(folder, file, env, logs / f"upstream-{file.stem}-{place}.xml")
            for files in found.values()
            for place, file in enumerate(files, 1)
        ]
    # Last, after everything that pytest prints.
    print("", *lines, sep="\n", flush=True)
    return int(any(line.startswith("failed") for line in lines))


def _make_checkpoint(stack: contextlib.ExitStack, env: Mapping[str, str]) -> Path:
    """A tiny checkpoint, and the prompts for SGLang's KL helpers; ``stack`` removes both."""
    out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inkling-sconv-"))) / "tiny"
    # The checkout's SGLang says where the prompts go, and this process may have another SGLang.
    command = [sys.executable, "-m", "inkling_sconv.tiny", str(out), "--kl-prompts"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise UserError((done.stderr.strip().splitlines() or ["no checkpoint was written"])[-1])
    stack.callback(Path(done.stdout.splitlines()[-1]).unlink, missing_ok=True)
    return out


def find_other_server(env: Mapping[str, str]) -> str | None:
    """The URL of the suites' servers, if something listens there already.

    They share one port, and would take whatever answers there for their own server.
    """
    code = "from sglang.test.test_utils import DEFAULT_URL_FOR_TEST as url; print('url:', url)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    said = re.search(r"^url: (http://\S+)$", done.stdout, re.MULTILINE)
    # A URL without a port that can be is a ValueError.
    with contextlib.suppress(OSError, ValueError):
        place = urlsplit(said.group(1) if said else "")
        if place.hostname and place.port:
            socket.create_connection((place.hostname, place.port), 5).close()
            return place.geturl()
    return None


def _list_divergences(junit: Path) -> Iterator[str]:
    """The averages of KL divergence that SGLang's helpers printed, test by test."""
    for case in ET.parse(junit).iter("testcase"):
        found = re.findall(r"^avg_kl_div=(\S+)$", case.findtext("system-out", ""), re.MULTILINE)
        if found:
            name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
            yield f"  {name}: avg_kl_div {', '.join(found)}"


def _run_suite(folder: Path, file: Path, env: Mapping[str, str], junit: Path) -> str:
    """Run one suite; its outcome, and the divergence of each case, in lines."""
    junit.unlink(missing_ok=True)
    name = file.relative_to(folder)
    print(f"running: {name}", flush=True)
    # Not this repository's pytest settings, nor a cache in the user's checkout.
    options = ("-p", "no:cacheprovider", f"--rootdir={folder}", f"--junit-xml={junit}", "-v")
    options += ("-o", "junit_logging=system-out")
    command = [sys.executable, "-m", "pytest", str(file), *options]
    code = subprocess.run(command, cwd=file.parent, env=env).returncode
    counts = gpu_test.count_outcomes(junit)
    if counts is None:
        return f"failed: {name}: no JUnit file, exit {code}"
    # pytest exits with 5 where it found no test; a suite whose tests are all skipped did not run.
    failed = code or counts.failed
    verdict = "failed" if failed else "passed" if counts.passed else "skipped"
    outcomes = "{} passed, {} failed, {} skipped".format(*counts)
    return "\n".join((f"{verdict}: {name}: {outcomes}, {junit}", *_list_divergences(junit)))


def main(arguments: Sequence[str]) -> int:
    """Run the suites of the checkout that ``arguments`` name."""
    try:
        folder = find_checkout(arguments[0] if arguments else "")
        if (reason := gpu_test.why_unavailable()) is not None:
            raise UserError(reason)
        env = make_environment(folder, os.environ)
        # What the plugin does to this SGLang, or why SGLang does not load it.
        state = subprocess.run(
            [sys.executable, "-m", "inkling_sconv"], env=env, capture_output=True, text=True
        )
        if state.returncode:
            said = state.stderr.strip().splitlines() or ["the plugin's state is unknown"]
            raise UserError(said[-1])
        print(state.stdout.strip(), flush=True)
        return run(folder, os.environ, gpu_test.make_log_folder())
    except UserError as error:
        print(f"upstream-suites: {error}", file=sys.stderr)
    except OSError as error:
        print(f"upstream-suites: {error.filename}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

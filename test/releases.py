"""Real SGLang releases, unpacked once into a cache, and forks made of them.

``python test/releases.py`` fetches all of them.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock
from inkling_sconv.codemod.unguard import remove_guard
from inkling_sconv.trees.overlay import overlay_tree
from inkling_sconv.trees.tree import BACKEND, Tree

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("INKLING_SCONV_CACHE", ROOT / ".cache"))

# Up to 0.5.19, SGLang does not import with the transformers that 0.5.23 pins.
_OLDER_TRANSFORMERS = ("transformers==5.12.1", "tokenizers==0.22.2")
RELEASES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("0.5.17", "0.5.18", "0.5.19"), _OLDER_TRANSFORMERS),
    **dict.fromkeys(("0.5.20", "0.5.21", "0.5.22", "0.5.23"), ()),
}
CRASHING = "crashing"
"""The fork between #34043 and #35042: 0.5.18 without the guard."""
TREES = (*RELEASES, CRASHING)


def release(version: str) -> Path:
    """The folder to put on ``PYTHONPATH`` for ``sglang==version``."""
    return _unpack(f"sglang=={version}")


def fork(source: str, text: str, out: Path) -> Path:
    """Make a copy of ``source``, with another text in the backend's file, as links in ``out``."""
    return overlay_tree(Tree(release(source)), text.encode(), out).root


def backend_text(source: str) -> str:
    """The text of the backend's file in a release, or in the crashing fork."""
    if source != CRASHING:
        return (release(source) / BACKEND).read_text()
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent))
    return subprocess.check_output(
        [ruff, "format", "--isolated", "-"],
        input=remove_guard(backend_text("0.5.18").encode()).decode(),
        text=True,
    )


def tree(name: str, out: Path) -> Path:
    """The folder to put on ``PYTHONPATH`` for a name of ``TREES``. A fork is made in ``out``."""
    return fork("0.5.18", backend_text(name), out) if name == CRASHING else release(name)


def environment(path: Path, name: str, **variables: str) -> dict[str, str]:
    """Variables with which Python imports SGLang from ``path``, a tree of ``name``; no GPU."""
    extra = RELEASES["0.5.18" if name == CRASHING else name]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("INKLING_", "SGLANG_"))}
    return {
        **inherited,
        "CUDA_VISIBLE_DEVICES": "",
        "INKLING_SCONV_CACHE": str(CACHE),
        "OMP_NUM_THREADS": "1",
        # Our package from this checkout, also where the interpreter's own is another one.
        "PYTHONPATH": os.pathsep.join(map(str, (path, ROOT / "python", *map(_unpack, extra)))),
        **variables,
    }


def _unpack(requirement: str) -> Path:
    """The folder of the unpacked wheel of ``requirement``; pip downloads it the first time."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    target = CACHE / "unpacked" / version / requirement
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.is_dir():
            return target
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        wheels = partial / "wheels"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "-d", str(wheels), requirement], check=True)
        (wheel,) = wheels.iterdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        shutil.rmtree(wheels)
        partial.rename(target)
    return target


if __name__ == "__main__":
    for number in RELEASES:
        release(number)
    for needed in sorted({name for names in RELEASES.values() for name in names}):
        _unpack(needed)

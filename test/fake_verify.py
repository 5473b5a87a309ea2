"""``inkling-sconv verify`` as on a machine with a GPU, with ``fake_server.py`` for the server."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from inkling_sconv import cli, server, verify

command = (sys.executable, "-S", str(Path(__file__).with_name("fake_server.py")))
verify.missing = lambda: None
verify.Server = functools.partial(server.Server, command=command)
server.GRACE_SECONDS = 1
cli.app()

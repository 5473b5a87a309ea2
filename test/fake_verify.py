"""``inkling-sconv verify`` as on a machine with a GPU, with ``fake_server.py`` for the server."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from inkling_sconv import cli
from inkling_sconv.proof import server, verify

command = (sys.executable, "-S", str(Path(__file__).with_name("fake_server.py")))
verify.why_unavailable = lambda: None
verify.Server = functools.partial(server.Server, command=command)
server.GRACE_SECONDS = 1
cli.app()

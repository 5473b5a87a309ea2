"""``benchmark/bench_server.py`` as on a machine with a GPU, with ``fake_server.py`` for a server.

``FAKE_BENCH`` names contenders and what is wrong with the server of each: ``a=healthy b=crashes``.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import bench_server
from inkling_sconv.proof import server

command = (sys.executable, "-S", str(Path(__file__).with_name("fake_server.py")))
modes = dict(pair.split("=") for pair in os.environ["FAKE_BENCH"].split())
bench_server.verify.why_unavailable = lambda: None
bench_server.verify.vocabulary = lambda _: 500
bench_server.contenders = lambda names: [
    bench_server.Contender(name, {"FAKE_SERVER": modes[name]}) for name in names
]
bench_server.Server = functools.partial(server.Server, command=command)
server.GRACE_SECONDS = 1
sys.exit(bench_server.main())

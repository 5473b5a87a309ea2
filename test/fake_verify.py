"""``inkling-sconv verify`` as on a machine with a GPU, with ``fake_server.py`` for the server."""

import functools

import fake_server
from inkling_sconv.__main__ import command
from inkling_sconv.proof import server, verify

verify.why_unavailable = lambda: None
verify.Server = functools.partial(server.Server, command=fake_server.COMMAND)
server.GRACE_SECONDS = 1
command()

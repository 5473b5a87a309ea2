"""Everything that runs in a server process. SGLang's ``load_plugins()`` calls ``register``.

``register`` only waits: it imports nothing of SGLang before SGLang imports its Inkling backend
itself. Then ``graft`` runs the backend once on CPU tensors and decides, and ``fixes`` looks at what
is around it.
"""

from __future__ import annotations

import wrapt

from inkling_sconv.names import BACKEND_MODULE


def register() -> None:
    """Have SGLang's Inkling backend inspected when SGLang imports it; at once if it already has."""
    wrapt.register_post_import_hook("inkling_sconv.plugin.graft:inspect_backends", BACKEND_MODULE)

"""Everything that runs in a server process. SGLang's ``load_plugins()`` calls ``register``.

``register`` imports nothing of SGLang. It waits until SGLang imports its Inkling backend. Then
``graft`` runs the backend once on CPU tensors and replaces its refresh if it has to, and ``fixes``
does the same for the runners around it.
"""

import wrapt

from inkling_sconv.names import BACKEND_MODULE


def register() -> None:
    """Inspect the Inkling backend when SGLang imports it, or now if it is already imported."""
    wrapt.register_post_import_hook("inkling_sconv.plugin.graft:inspect_backends", BACKEND_MODULE)

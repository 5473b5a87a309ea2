"""``python -m inkling_sconv.tiny OUT``: a small Inkling checkpoint. It needs no extras."""

import sys

from inkling_sconv.proof.checkpoint import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m inkling_sconv.tiny OUT``: make a tiny Inkling checkpoint. It needs no extras."""

import sys

from inkling_sconv.proof.checkpoint import main

if __name__ == "__main__":
    sys.exit(main())

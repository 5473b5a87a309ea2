"""A real server on a tiny checkpoint, and the exact comparison of its answers."""

"""A real server on a small checkpoint, and what it answers compared to the bit."""

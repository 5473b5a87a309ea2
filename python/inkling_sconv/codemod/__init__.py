"""Add the guard to a fork's own source, or export it as a commit. Nothing here imports SGLang."""

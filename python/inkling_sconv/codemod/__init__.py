"""The guard as an edit of a fork's own source, and as a commit. Nothing here imports SGLang."""

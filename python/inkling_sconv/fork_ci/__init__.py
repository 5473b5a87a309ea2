"""The registered tests and a workflow, and how ``ci-init`` copies them into a fork."""

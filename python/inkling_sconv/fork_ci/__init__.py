"""What ``ci-init`` copies into a fork: the registered tests and a workflow."""

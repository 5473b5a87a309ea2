"""``inkling-sconv tiny``."""

import typer


def tiny(context: typer.Context) -> None:
    """Write a small Inkling checkpoint with MTP heads, without a download."""
    from inkling_sconv.proof import checkpoint

    raise typer.Exit(checkpoint.main(context.args))

"""``inkling-sconv verify``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from inkling_sconv.cli.common import AsJson, fail


def verify(
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="An Inkling checkpoint with MTP heads. Default: a new tiny one."
        ),
    ] = None,
    log: Annotated[
        Path, typer.Option(metavar="FILE", help="Write the server's log to this file.")
    ] = Path("inkling-sconv-server.log"),
    timeout: Annotated[float, typer.Option(help="Seconds the server may take to start.")] = 600,
    heads: Annotated[int, typer.Option(min=1, max=8, help="Serve with this many MTP heads.")] = 2,
    lazy: Annotated[
        bool, typer.Option("--lazy", help="Serve with the radix strategy extra_buffer_lazy.")
    ] = False,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Serve without the MTP heads.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """On a GPU, start a server with MTP and CUDA graphs, and check that state reuse is bit-exact.

    Prefill graphs are the release's default.

    Exit 0: all are equal; 1: some differ, or the server failed; 2: this machine cannot run it.
    """
    import tempfile

    from inkling_sconv.proof import verify as verification
    from inkling_sconv.proof.server import TINY_OPTIONS

    reason = verification.why_unavailable()
    if reason is not None:
        fail(f"verify: {reason}")
    if not timeout > 0:
        fail(f"verify: --timeout {timeout:g}: not a positive number of seconds")
    from rich.console import Console

    console = Console(stderr=True)
    options: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory(prefix="inkling-sconv-") as folder:
        if model is None:
            from inkling_sconv.proof.checkpoint import write_checkpoint

            model = Path(folder) / "tiny"
            write_checkpoint(model, mtp_heads=heads)
            options = TINY_OPTIONS
        vocabulary = verification.read_vocabulary_size(model)
        if not no_speculation:
            verification.check_heads(model, heads)
        with console.status("") as status:
            result = verification.verify(
                model,
                log,
                status.update,
                vocabulary=vocabulary,
                heads=0 if no_speculation else heads,
                lazy=lazy,
                options=options,
                start_seconds=timeout,
            )
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        _print_result(result)
    raise typer.Exit(0 if result.passed else 1)


def _print_result(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    if not result.comparisons:
        print(f"failed: {result.error}")
        return
    table = Table("compared", "floats", "differ", "largest", "cached tokens")
    for comparison in result.comparisons:
        figures = (comparison.compared, comparison.differing, comparison.largest)
        cached = " ".join(map(str, comparison.cached)) or "-"
        table.add_row(comparison.name, *map(str, figures), cached)
    Console().print(table)
    heads = f"{result.heads} MTP heads" if result.heads else "no speculation"
    print(f"{heads}; prefill graph: {result.prefill_graph}")
    print(f"{result.seconds:.0f} s, {result.start_seconds:.0f} s of them to start the server")
    print(f"accept length {result.accept_length:.2f}; {result.distinct_tokens} distinct tokens")
    print("passed" if result.passed else f"failed: {result.error}")

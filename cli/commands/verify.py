"""``streamq verify``."""

from pathlib import Path
from typing import Annotated

import typer

from streamq.records.manifest import verify_output as compare

from .. import render
from ..shared_options import JsonOption


def verify(
    outputs: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Outputs that were written with --manifest."),
    ],
    as_json: JsonOption = False,
) -> None:
    """Compare outputs with their manifests: every byte of them, their failures and their inputs.

    A manifest is written by run --manifest and results --manifest, as out.manifest.json beside
    out.jsonl. It needs no server, and exits with 1 if something is not as it was.

        streamq verify out.jsonl
    """
    found = [(output, each) for output in outputs for each in compare(Path(output))]
    if as_json:
        render.as_json([{"file": output, "ok": f.is_good, "says": f.says} for output, f in found])
    else:
        for _, each in found:
            render.data(render.clean(f"{'ok ' if each.is_good else 'BAD'} {each.says}"))
    bad = sum(not each.is_good for _, each in found)
    if bad:
        render.error(f"{bad} of {len(found)} checks failed")
        raise typer.Exit(1)

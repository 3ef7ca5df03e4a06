"""Describe files, one part for each: any work on whole files looks like this."""

import hashlib

from streamq import App, Context

app = App()


@app.map
def describe(content: bytes, context: Context) -> dict[str, str | int]:
    """Return name, size and checksum of a file."""
    return {
        "file": context.source,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }

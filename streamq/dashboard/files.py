"""The files that browsers get, from the package: read once, and named by their digest."""

import hashlib
from functools import cache
from importlib.resources import files

import msgspec

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
#: Where the page names the folder of the others.
_MARK = b"{{static}}"
#: What the pages may do: nothing but show themselves and talk to the gateway they came from.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types lit-html"
)


class File(msgspec.Struct, frozen=True):
    """A file that browsers are sent."""

    content: bytes
    kind: str


class Pages(msgspec.Struct, frozen=True):
    """All files, and the digest of them that is a part of their address."""

    digest: str
    index: bytes
    files: dict[str, File]


@cache
def dashboard_pages() -> Pages:
    """Return the files of the pages."""
    found = {
        each.name: File(each.read_bytes(), _TYPES[each.name.rpartition(".")[2]])
        for each in files("streamq.dashboard").joinpath("static").iterdir()
        if each.name.rpartition(".")[2] in _TYPES
    }
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(found):
        digest.update(name.encode() + found[name].content)
    folder = f"/static/{digest.hexdigest()}"
    index = found.pop("index.html").content.replace(_MARK, folder.encode())
    return Pages(digest.hexdigest(), index, found)

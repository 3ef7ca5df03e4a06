"""A request as one file that opens in a browser, offline, for as long as there are browsers.

The file has the same modules as the pages, each as an address of data, and what the pages would
have asked for.
"""

import time
from base64 import b64encode
from typing import Any

import msgspec

from streamq.dashboard import failures
from streamq.dashboard.census import Census
from streamq.dashboard.curve import Curve, Point, curve_of
from streamq.dashboard.files import dashboard_pages
from streamq.dashboard.input_map import read_map
from streamq.dashboard.why import reason_held_back
from streamq.protocol.protocol import Protocol
from streamq.queue.changes import read_changes
from streamq.queue.flow_status import status_of_request_or_flow

#: What the file may do: run what is in it, and load nothing.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)


def make_report(protocol: Protocol, request_id: str, points: list[Point] | None = None) -> bytes:
    """Return the page of a request as it is now, as one HTML file.

    ``points``: its curve, if somebody has watched it; else the one that it keeps itself is shown.
    """
    snapshot = protocol.inspect(request_id)
    status = status_of_request_or_flow(protocol, snapshot)
    census = Census(protocol, status.queue)
    if status.state.is_live:
        census.look()
    curve = Curve()
    for point in points or curve_of(protocol, request_id):
        curve.add(point)
    slots, busy = census.slots_of(status.handler)
    noted = read_changes(protocol, status.queue)
    changes = [
        msgspec.structs.replace(each, address="") for each in noted if each.request == request_id
    ]
    data: dict[str, Any] = {
        "id": request_id,
        "t": round(time.time() * 1e3),
        "failures": True,
        "frames": {
            f"r:{request_id}": {
                "status": status,
                "speed": status.rate,
                "ending": curve.ending(status.rate) if status.state == "open" else None,
                "why": reason_held_back(status, census),
                "slots": {"able": slots, "busy": busy},
                "spec": snapshot.spec,
            },
            f"m:{request_id}": read_map(protocol, request_id),
            f"f:{request_id}": failures.read_failure_groups(protocol, request_id, traces=False),
            f"l:{status.queue}": {"changes": changes},
        },
        "points": {f"r:{request_id}": curve.points},
    }
    return _report_page(request_id, msgspec.json.encode(data))


def _report_page(title: str, data: bytes) -> bytes:
    found = dashboard_pages().files
    addresses = {
        f"streamq/{name}": _report_module_as_data_url(file.content)
        for name, file in found.items()
        if name.endswith(".js")
    }
    return b"\n".join(
        [
            b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            b'<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'.encode(),
            f"<title>{title}</title><style>".encode(),
            found["style.css"].content,
            b'</style><script type="importmap">',
            msgspec.json.encode({"imports": addresses}),
            # A less-than sign is escaped, so no text can end the element early.
            b'</script></head><body><div id="app"></div>',
            b'<script type="application/json" id="report-data">',
            data.replace(b"<", rb"\u003c"),
            b'</script><script type="module">import "streamq/app.js";</script></body></html>\n',
        ]
    )


def _report_module_as_data_url(module: bytes) -> str:
    # A data: address has no folder, so modules are imported by their full names.
    whole = module.replace(b"'./", b"'streamq/")
    return "data:text/javascript;base64," + b64encode(whole).decode()

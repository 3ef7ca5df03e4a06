"""``streamq doctor``."""

from typing import Annotated

import typer

from streamq import units
from streamq.admin.doctor import Doctor
from streamq.admin.server_checks import FAIL, Finding
from streamq.driver.connection import Connection
from streamq.protocol.protocol import Protocol
from streamq.settings import Settings

from .. import render
from ..connecting import url_of_options
from ..shared_options import JsonOption, PrefixOption, UrlOption


def doctor(
    queues: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="NAME", help="Check only this queue; may be repeated."),
    ] = None,
    is_mending: Annotated[
        bool, typer.Option("--fix", help="Mend what can be mended without harm.")
    ] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Check the server's settings and the queues' invariants; say what is wrong and what to do.

    Each line is ok, warn or fail. The exit code is 1 if one is fail, 3 if the server cannot
    be reached. With --fix the eviction policy is set, tokens that are lost are pushed, leases
    that have expired are taken back, and requests that are in no index are registered.

        streamq doctor --fix
    """
    settings = Settings.from_env()
    name = units.name(prefix or settings.prefix, "prefix")
    chosen = [units.name(queue, "queue") for queue in queues or ()]
    connection = Connection(url_of_options(url))
    try:
        connection.enter(is_insecure=settings.insecure)
        findings: list[Finding] = []
        physician = Doctor(Protocol(connection, name), name, is_mending=is_mending)
        for finding in physician.examine(chosen):
            findings.append(finding)
            if not as_json:
                _show_finding(finding)
    finally:
        connection.close()
    if as_json:
        render.as_json(findings)
    if any(finding.verdict == FAIL for finding in findings):
        raise typer.Exit(1)


def _show_finding(finding: Finding) -> None:
    verdict = render.verdict(finding.verdict)
    render.data(f"{verdict}  {finding.check:<11} {render.clean(finding.says)}")
    if finding.remedy:
        render.data(f"      {'':<11} → {finding.remedy}")

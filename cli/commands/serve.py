"""``streamq serve``, and ``streamq serve key``."""

import sys
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from streamq import units
from streamq.errors import InvalidValue, SettingsError
from streamq.settings import Settings

from .. import render
from ..connecting import connected
from ..option_structs import with_options
from ..shared_options import (
    HealthPortOption,
    JsonOption,
    LogFormat,
    LogFormatOption,
    LogLevel,
    LogLevelOption,
    PrefixOption,
    UrlOption,
    use_log_options,
)

#: Where ``serve key`` writes if no file is named.
KEYS = Path("streamq.keys")


class KeyRole(StrEnum):
    """What a key may be used for."""

    READER = "reader"
    WORKER = "worker"
    LOADER = "loader"
    OPERATOR = "operator"


class Doors(msgspec.Struct, frozen=True, kw_only=True):
    """Who may come in, and how."""

    grpc: Annotated[
        str,
        typer.Option(
            "--grpc",
            metavar="HOST:PORT",
            help="Listen for gRPC, too, such as 127.0.0.1:8471; needs 'streamq[grpc]'.",
        ),
    ] = ""
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys", metavar="FILE", help="File with keys; without one listen on loopback only."
        ),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate to show.")
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="Key of that certificate.")
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-client-ca",
            metavar="FILE",
            help="Accept certificates of this CA; the name in one is the name of a key.",
        ),
    ] = None
    origin: Annotated[
        str,
        typer.Option(
            "--origin", metavar="URL", help="The URL that browsers use, if a proxy is in front."
        ),
    ] = ""
    health_port: HealthPortOption = ""
    max_connections: Annotated[
        int,
        typer.Option(
            "--max-connections",
            min=1,
            max=1_000_000,
            help="So many connections, for each process. Silent ones make room for others.",
        ),
    ] = 12_000
    is_read_only: Annotated[
        bool, typer.Option("--read-only", help="Answer only what readers may ask.")
    ] = False


@with_options
def serve(
    context: typer.Context,
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="HOST:PORT", help="Where to listen; port 0 is a free one."
        ),
    ] = "127.0.0.1:8470",
    queues: Annotated[
        list[str],
        typer.Option(
            "--queue", envvar="STREAMQ_QUEUE", metavar="NAME", help="A queue; may be repeated."
        ),
    ] = ["default"],  # noqa: B006  typer reads it and nobody changes it
    doors: Doors = Doors(),  # noqa: B008  it is frozen
    processes: Annotated[
        int,
        typer.Option("--processes", "-p", min=1, max=64, help="Processes that share the port."),
    ] = 1,
    grace: Annotated[
        str,
        typer.Option(
            "--grace", metavar="TIME", help="When told to stop, finish answers for so long."
        ),
    ] = "25s",
    log_level: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Serve workers and loaders in any language, over HTTP and JSON.

    Workers take parts with POST /v1/take and report them with POST /v1/report; loaders submit with
    POST /v1/requests. It sweeps its queues as a janitor does. It needs: pip install
    'streamq[serve]'. To serve other machines it needs keys, which "streamq serve key" makes, and
    TLS; with --insecure a proxy in front has TLS. Ctrl-C or TERM ends it politely.

        streamq serve --queue default --listen 127.0.0.1:8470
    """
    if context.invoked_subcommand:
        return
    try:
        from streamq.gateway import supervisor
        from streamq.gateway.listener import Tls
        from streamq.gateway.service import ServiceOptions, serve_gateway

        if doors.grpc:
            import_module("streamq.gateway.grpc_service")
    except ModuleNotFoundError as error:
        raise _package_missing_to_serve(error) from None
    host, port = _serve_address_option(listen, "--listen")
    options = ServiceOptions(
        host=host,
        port=port,
        queues=tuple(units.name(queue, "queue") for queue in dict.fromkeys(queues)),
        grpc=_serve_address_option(doors.grpc, "--grpc")
        if doors.grpc and not doors.is_read_only
        else None,
        grace_s=units.duration_ms(grace, "--grace") / 1e3,
        keys=doors.keys,
        tls=Tls(doors.tls_cert, doors.tls_key, doors.tls_client_ca),
        is_insecure=Settings.from_env().insecure,
        origin=_serve_origin_option(doors.origin),
        is_read_only=doors.is_read_only,
        health_port=doors.health_port,
        connections=doors.max_connections,
    )
    use_log_options(log_level, log_format)
    if processes > 1 and supervisor.secret_of_processes() is None:
        if options.grpc and not options.grpc[1]:
            raise InvalidValue("several processes share a port: give --grpc one that is not 0")
        several = supervisor.GatewaySupervisor(
            sys.argv[1:], processes, host, port, doors.health_port
        )
        several.run(options.grace_s)
        return
    with connected(url, prefix, is_patient=False, is_warned=True) as protocol:
        serve_gateway(protocol, options, lambda address: render.note(f"serving at {address}"))


def key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.")],
    role: Annotated[
        KeyRole, typer.Option("--role", help="What the key may be used for.", show_default=False)
    ],
    queues: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="NAME", help="Only for this queue; may be repeated."),
    ] = None,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="End it after so long.")
    ] = "",
    keys: Annotated[Path, typer.Option("--keys", metavar="FILE", help="File to add it to.")] = KEYS,
    as_json: JsonOption = False,
) -> None:
    """Make a key for a caller of the gateway, and print it. It is shown only now.

    A reader may look; a worker may take and report parts, too; a loader may submit requests and
    read their results, too; an operator may do everything. The file gets a digest of the key. All
    gateways need the same file, and read it again when it changes.

        streamq serve key mill-7 --role worker --queue default --expires 90d
    """
    try:
        from streamq.gateway import keys as key_file
        from streamq.gateway.roles import Role
    except ModuleNotFoundError as error:
        raise _package_missing_to_serve(error) from None
    chosen = [
        units.name(queue, "queue") for words in queues or () for queue in words.split(",") if queue
    ]
    lasts_s = units.duration_ms(expires, "--expires") / 1e3 if expires else None
    units.name(name, "key")
    text = key_file.add_key(keys, name, Role(role.value), chosen or None, lasts_s)
    if as_json:
        render.as_json({"name": name, "role": role.value, "key": text, "file": str(keys)})
        return
    render.data(text)
    render.note(f"{keys} has its digest; the key itself is kept nowhere")
    render.note(f"gateways need it: streamq serve --keys {keys}")


def _package_missing_to_serve(error: ModuleNotFoundError) -> SettingsError:
    extra = "grpc" if str(error.name).startswith(("grpc", "google")) else "serve"
    return SettingsError(
        f"the gateway needs the package {error.name}: pip install 'streamq[{extra}]'"
    )


def _serve_address_option(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not host:
        raise InvalidValue(f"{option} {text!r}: write 127.0.0.1:8470 or [::1]:8470")
    return host.strip("[]"), units.whole(int(port), option, 0, 65_535)


def _serve_origin_option(text: str) -> str:
    if text and not text.startswith(("http://", "https://")):
        raise InvalidValue(f"--origin {text!r}: write https://queue.example")
    return text

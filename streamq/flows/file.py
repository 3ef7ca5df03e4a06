"""A flow as a TOML file: its name, the app that has its handlers, and a table for each stage."""

import tomllib
from pathlib import Path
from typing import Any

from streamq.errors import InvalidValue
from streamq.flows.flow import Flow, stage
from streamq.flows.shape import KINDS


def read_flow_file(path: Path) -> Flow:
    """Return the flow that a file describes.

    Raises:
        InvalidValue: the file is not there, is no TOML, or describes no flow.
    """
    try:
        told = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidValue(f"{path}: {error}") from None
    unknown = sorted(set(told) - {"name", "app", "stage"})
    if unknown:
        raise InvalidValue(
            f"{path}: there is no {', '.join(unknown)}; write name, app and [[stage]]"
        )
    stages = told.get("stage", [])
    if not isinstance(stages, list) or not all(isinstance(each, dict) for each in stages):
        raise InvalidValue(f"{path}: write each stage as a table, [[stage]]")
    name, app = told.get("name", path.stem), told.get("app", "")
    return Flow(str(name), [_stage_of_flow_file(path, each) for each in stages], app=str(app))


def _stage_of_flow_file(path: Path, told: dict[str, Any]) -> Any:
    options = dict(told)
    kind, handler = options.pop("kind", "map"), options.pop("handler", "")
    if kind not in KINDS:
        raise InvalidValue(f"{path}: a stage is no {kind!r}; there are {', '.join(KINDS)}")
    if not handler:
        raise InvalidValue(f"{path}: a stage of kind {kind} names no handler")
    return stage(kind, str(handler), options)

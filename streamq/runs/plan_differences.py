"""Tells whether a command describes the same work as a run that was stopped. Needs no redis-py."""

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamq.driver.url import mask_passwords_of_url
from streamq.errors import InvalidValue
from streamq.model import WEIGHT, Policy, StagePlan
from streamq.queue.options import Named
from streamq.records.inputs import STDIN
from streamq.records.remote import is_remote
from streamq.runs.plan import Plan

#: Fields of a plan that may differ: they change how fast the work is done, not what is done. Those
#: of the last lines are compared in a way of their own.
_FREE = {"id", "processes", "slots", "window_bytes", "force", "replaces", "policy.handler"}
_FREE |= {"keep_ms", "policy.keep_ms", "folder", "moved_from", "serves", "has_manifest", "spools"}
_FREE |= {"policy.spec.by_reference"}
#: Stages of a flow are compared in a way of their own, too.
_FREE |= {"policy.flow", "policy.flow.stages"}
_FREE |= {"output", "target", "argv", "code", "server", "policy.spec.files", "policy.spec.header"}
#: These are changed in a request while it runs, as ``streamq set`` does.
STEERED = ("level", "limit", "rate_ms", "weight")
_FREE |= {f"policy.{name}" for name in STEERED} | {"policy.labels", "policy.delay_ms"}
#: Options whose names differ from the names of their fields.
_OPTIONS = {
    "form": "output_format",
    "is_ordered": "ordered",
    "size.records": "lines",
    "policy.max_percent": "max_failures",
    "policy.spec.timeout_ms": "timeout",
    "policy.spec.names": "header",
}


def has_same_output(one: Plan, other: Plan) -> bool:
    """Return whether two runs write to the same file."""
    return os.path.realpath(one.output) == os.path.realpath(other.output)


def differences_of_plans(then: Plan, now: Plan, named: Named) -> list[str]:
    """Return in words why a command is not the one that began a run; none if it is the same.

    ``named`` returns what an option is called in messages.
    """
    found = [
        *_difference_of_function(then, now),
        *_difference_of_inputs(then, now),
        *_differences_of_options(then, now, named),
    ]
    found += [] if found else _differences_of_stages(then, now)
    if then.server != now.server:
        found.append(f"the server was {then.server or _OWN}, and is {now.server or _OWN}")
    return found


_OWN = "one of the run's own"


def _difference_of_function(then: Plan, now: Plan) -> Iterator[str]:
    if then.argv != now.argv and (then.argv or now.argv):
        was, is_now = (" ".join(each.argv) or each.target for each in (then, now))
        yield f"the program was {was}, and is {is_now}"
    elif then.target != now.target:
        yield f"the function was {then.target}, and is {now.target}"
    elif then.code != now.code and then.code[0]:
        yield f"the function changed: {then.code[0]} has other content than it had"


def _difference_of_inputs(then: Plan, now: Plan) -> Iterator[str]:
    old, new = _absolute_inputs(then), _absolute_inputs(now)
    if STDIN in (*old, *new):
        yield "it reads standard input, which can be read only once"
    elif len(old) != len(new):
        yield f"the input was {len(old)} files, and is {len(new)}"
    for was, is_now in zip(old, new, strict=False):
        if was != is_now:
            yield f"the input was {was}, and is {is_now}"
            return
    if then.policy.spec.header != now.policy.spec.header and len(old) == len(new):
        was, is_now = then.policy.spec.header, now.policy.spec.header
        yield f"the input changed: its header was {was.strip()!r}, and is {is_now.strip()!r}"


def _absolute_inputs(plan: Plan) -> list[str]:
    return [
        name if name == STDIN or is_remote(name) else str(Path(name).absolute())
        for name in plan.policy.spec.files
    ]


def _differences_of_options(then: Plan, now: Plan, named: Named) -> Iterator[str]:
    old, new = dict(_flat_fields(then)), dict(_flat_fields(now))
    for field in sorted((old.keys() | new.keys()) - _FREE):
        was, is_now = old.get(field), new.get(field)
        if was == is_now:
            continue
        if field == "size.is_automatic":
            yield f"parts were {_how_parts_are_sized(was)}, and are {_how_parts_are_sized(is_now)}"
        else:
            option = named(_OPTIONS.get(field, field.rpartition(".")[2]))
            yield f"{option} was {_option_in_words(was)}, and is {_option_in_words(is_now)}"


def _differences_of_stages(then: Plan, now: Plan) -> Iterator[str]:
    """Tell of stages of a flow that are not what they were, where nothing else differs."""
    old, new = _stages_without_serving(then), _stages_without_serving(now)
    if len(old) != len(new):
        yield f"the flow had {len(old)} stages, and has {len(new)}"
    for number, (was, is_now) in enumerate(zip(old, new, strict=False), 1):
        if was != is_now:
            yield f"stage {number} of the flow is not what it was"


def _stages_without_serving(plan: Plan) -> list[StagePlan]:
    """Return the stages of a flow under their handlers' own names, without what may differ."""
    stages = plan.policy.flow.stages if plan.policy.flow else ()
    same = dict.fromkeys((*STEERED, "keep_ms", "delay_ms"), 0) | {"labels": msgspec.UNSET}
    return [
        msgspec.structs.replace(
            stage,
            policy=msgspec.structs.replace(
                stage.policy,
                handler=plan.serves.get(stage.policy.handler, ""),
                spec=msgspec.structs.replace(stage.policy.spec, files=(), header=""),
                flow=msgspec.UNSET,
                **same,
            ),
        )
        for stage in stages
    ]


def _flat_fields(value: msgspec.Struct, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a struct and of the structs in it, with dots in their names."""
    for name, each in msgspec.structs.asdict(value).items():
        if isinstance(each, msgspec.Struct):
            yield from _flat_fields(each, f"{above}{name}.")
        else:
            yield f"{above}{name}", each


def _how_parts_are_sized(is_automatic: Any) -> str:
    return "sized by time" if is_automatic is True else "of a given size"


def _option_in_words(value: Any) -> str:
    return "not given" if value in (None, "", (), -1) else str(value)


def fields_to_steer(then: Plan, now: Plan) -> dict[str, dict[str, Any]]:
    """Return the level, limit, rate and weight that a resumed request has to be set to.

    Of a flow: those of each stage that has to be set, by the place of the stage.
    """
    found = {
        place: _steered_fields(was, is_now)
        for place, was, is_now in zip(
            then.places, _policies_of_plan(then), _policies_of_plan(now), strict=True
        )
    }
    return {place: changes for place, changes in found.items() if changes}


def _policies_of_plan(plan: Plan) -> list[Policy]:
    """Return the policy of the request, or of each stage of its flow."""
    flow = plan.policy.flow
    return [stage.policy for stage in flow.stages] if flow else [plan.policy]


def _steered_fields(then: Policy, now: Policy) -> dict[str, Any]:
    pairs = ((name, getattr(then, name), getattr(now, name)) for name in STEERED)
    found = {name: is_now for name, was, is_now in pairs if was != is_now}
    return {name: WEIGHT if value is msgspec.UNSET else value for name, value in found.items()}


def name_of_server(url: str, prefix: str) -> str:
    """Return what tells a server that was named from others, without passwords; "" for none."""
    return f"{mask_passwords_of_url(url)} {prefix}" if url else ""


def plan_on_server(plan: Plan, server: str) -> Plan:
    """Return the plan for a run on that server.

    Raises:
        InvalidValue: the run was begun on another one.
    """
    if plan.server and plan.server != server:
        raise InvalidValue(f"run {plan.id} has its data in the server {plan.server}: give its URL")
    return msgspec.structs.replace(plan, server=server)


def code_file_and_digest(target: str, argv: Sequence[str]) -> tuple[str, str]:
    """Return the file of a function or a program, and a digest of its content.

    The file is found by its name, because the process that asks must not import it. Two empty
    texts stand for a file that is not found so.
    """
    for path in _files_of_plan(target, argv):
        try:
            digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        except OSError:
            continue
        return str(path), digest
    return "", ""


def _files_of_plan(target: str, argv: Sequence[str]) -> Iterator[Path]:
    if argv:
        # A program on the path was installed: its user does not edit it between two runs.
        if "/" in argv[0]:
            yield Path(argv[0])
        return
    if target.endswith(".toml"):
        yield Path(target)
        return
    module = target.rpartition(":")[0]
    if module.endswith(".py"):
        yield Path(module)
        return
    if not all(module.strip("/").split(".")):
        return  # no module has such a name
    for folder in (Path(), *map(Path, sys.path)):
        place = folder.joinpath(*module.split("."))
        yield place.with_name(f"{place.name}.py")
        yield place / "__init__.py"

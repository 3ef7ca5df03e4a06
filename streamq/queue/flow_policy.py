"""A flow as users wrote it, checked, as the policy of a request: one policy for each stage.

Needs no redis-py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from streamq.errors import InvalidValue
from streamq.flows.flow import Flow, Stage, flow_window_bounds
from streamq.flows.shape import Follow, Shape
from streamq.model import WEIGHT, FlowPlan, Policy, Spec, StagePlan
from streamq.queue.options import policy_of_options
from streamq.records.decoding import ITEMS


def flow_policy(
    flow: Flow,
    common: Mapping[str, Any],
    spec: Spec = Spec(),  # noqa: B008  it is frozen
    served: Mapping[str, str] = MappingProxyType({}),
    follow: Follow = "",
) -> Policy:
    """Return the policy of a request that is a flow.

    ``common`` has the options of the request: those that a stage does not set itself are the
    request's. ``spec`` says how the input of the first stage is read. ``served``: by the name of a
    handler another one, under which it serves; then all stages are in the queue of the request.
    ``follow``: what is kept of each item on its way.

    Raises:
        InvalidValue: there can be no such flow, or an option of a stage is not allowed.
    """
    shape = msgspec.structs.replace(flow.shape, follow=follow)
    stages = tuple(
        _stage_plan(shape, number, each, common, spec, served)
        for number, each in enumerate(flow.stages, 1)
    )
    return msgspec.structs.replace(stages[0].policy, flow=FlowPlan(flow.name, stages))


def follow_of_stage(*, key: object, track: bool, trace: bool) -> Follow:
    """Return what is kept of each item on its way, by the options that ask for it."""
    return "trace" if trace else "track" if track or key else ""


def shares_of_stages(stages: int, weight: int) -> list[int]:
    """Return the weights of the stages: together about that of one request, the last the largest.

    None is below 2: with 1 the workers of a fleet would wake up one after the other.
    """
    if stages == 1:
        return [weight]
    last = {2: 5, 3: 4}.get(stages, 4)
    each = max(2, (WEIGHT - last) // (stages - 1))
    return [max(2, share * weight // WEIGHT) for share in [*[each] * (stages - 1), last]]


def _stage_plan(
    shape: Shape,
    number: int,
    stage: Stage,
    common: Mapping[str, Any],
    spec: Spec,
    served: Mapping[str, str],
) -> StagePlan:
    has_window = number > 1 and stage.kind in ("map", "spread")
    try:
        bounds = flow_window_bounds(stage.window) if has_window else (0, 0)
        own = {
            name: value
            for name, value in msgspec.structs.asdict(stage).items()
            if value is not None
            and name not in ("kind", "handler", "window", "on_failure", "width")
        }
        share = shares_of_stages(len(shape), common.get("weight", WEIGHT))[number - 1]
        options = {**common, "weight": share, **own}
        options["handler"] = served.get(stage.handler, stage.handler)
        if served:
            options["queue"] = common["queue"]
        if stage.kind == "reduce" and not stage.width:
            options["limit"] = 1
        if number > 1:
            for name in ("labels", "canary", "delay", "calls", "key"):
                options.pop(name, None)
            spec = Spec(format=ITEMS, files=spec.files)
        told = msgspec.structs.replace(
            spec,
            stage=number,
            shape=shape.text,
            facts=f"{shape.facts(number)} {bounds[0]} {bounds[1]} {shape.follow}".rstrip(),
            on_failure=stage.on_failure,
            width=stage.width or 0,
        )
        return StagePlan(
            kind=stage.kind, policy=policy_of_options(**options, spec=told), window=bounds
        )
    except InvalidValue as error:
        raise InvalidValue(f"stage {number} ({stage.handler}): {error}") from None

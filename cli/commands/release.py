"""``streamq release``."""

from typing import Any

from streamq.queue.request import Request

from ..finding import steer_each_request
from ..shared_options import JsonOption, PrefixOption, RunIdsArgument, UrlOption


def release(
    ids: RunIdsArgument = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Let all parts of requests run that were loaded with --canary.

    To end such a request instead, cancel it: the parts behind the canary never run.

        streamq release nightly
    """

    def act(request: Request) -> tuple[str, dict[str, Any]]:
        request.release()
        return "released", {"canary": None}

    steer_each_request(ids or [], url, prefix, act, lambda _: "release", as_json=as_json)

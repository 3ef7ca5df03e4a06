"""``streamq pause``."""

from typing import Any

from streamq.queue.request import Request

from ..finding import steer_each_request
from ..shared_options import JsonOption, PrefixOption, RunIdsArgument, UrlOption


def pause(
    ids: RunIdsArgument = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Start no more parts of requests; running parts go on to their end.

    streamq pause nightly
    """

    def act(request: Request) -> tuple[str, dict[str, Any]]:
        request.pause()
        return "paused", {"paused": True}

    steer_each_request(ids or [], url, prefix, act, lambda _: "pause", as_json=as_json)

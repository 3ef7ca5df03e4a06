"""``streamq resume``."""

from typing import Any

from streamq.queue.request import Request

from ..finding import steer_each_request
from ..shared_options import JsonOption, PrefixOption, RunIdsArgument, UrlOption


def resume(
    ids: RunIdsArgument = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Start parts of requests again after a pause.

    streamq resume nightly
    """

    def act(request: Request) -> tuple[str, dict[str, Any]]:
        request.resume()
        return "resumed", {"paused": False}

    steer_each_request(ids or [], url, prefix, act, lambda _: "resume", as_json=as_json)

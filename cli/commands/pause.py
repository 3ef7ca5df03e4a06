"""``streamq pause``."""

from typing import Any

from streamq.queue.request import Request

from ..connecting import steer
from ..shared_options import IdsArgument, JsonOption, PrefixOption, UrlOption


def pause(
    ids: IdsArgument,
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

    steer(ids, url, prefix, act, as_json=as_json)

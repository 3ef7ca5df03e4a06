"""``streamq pause``."""

from streamq.queue.request import Request

from ..connecting import steer
from ..shared_options import IdsArgument, PrefixOption, UrlOption


def pause(ids: IdsArgument, url: UrlOption = None, prefix: PrefixOption = None) -> None:
    """Start no more parts of requests; running parts go on to their end.

    streamq pause nightly
    """

    def act(request: Request) -> str:
        request.pause()
        return "paused"

    steer(ids, url, prefix, act)

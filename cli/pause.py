"""``streamq pause``."""

from streamq.queue.client import Request

from .context import IdsArgument, PrefixOption, UrlOption, steer


def pause(ids: IdsArgument, url: UrlOption = None, prefix: PrefixOption = None) -> None:
    """Start no more parts of requests; what runs goes on to its end.

    streamq pause nightly
    """

    def act(request: Request) -> str:
        request.pause()
        return "paused"

    steer(ids, url, prefix, act)

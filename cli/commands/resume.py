"""``streamq resume``."""

from streamq.queue.request import Request

from ..connecting import steer
from ..shared_options import IdsArgument, PrefixOption, UrlOption


def resume(ids: IdsArgument, url: UrlOption = None, prefix: PrefixOption = None) -> None:
    """Start parts of requests again after a pause.

    streamq resume nightly
    """

    def act(request: Request) -> str:
        request.resume()
        return "resumed"

    steer(ids, url, prefix, act)

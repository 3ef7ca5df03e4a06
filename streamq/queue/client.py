"""Submitting requests, finding them again, and listing them."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from streamq import units
from streamq.driver.connection import Connection
from streamq.errors import (
    Damaged,
    InvalidValue,
    PartlySubmitted,
    RequestUnknown,
    SettingsError,
    StreamqError,
)
from streamq.flows.flow import Flow
from streamq.flows.shape import Follow
from streamq.model import LEVEL, LIMIT, MAX_PART, POISON, PREFIX, WEIGHT, Policy, Status
from streamq.protocol.protocol import Protocol
from streamq.queue.callbacks import (
    Target,
    callbacks_of,
    callbacks_with_deadline,
    refuse_taken_callback_ids,
)
from streamq.queue.fleet import check_fleet
from streamq.queue.flow_policy import flow_policy, follow_of_stage
from streamq.queue.gateway_calls import GatewayCalls, is_gateway
from streamq.queue.gateway_client import GatewayQueue
from streamq.queue.loading import keep_registered
from streamq.queue.options import policy_of_options
from streamq.queue.request import Request
from streamq.queue.submission import Submission
from streamq.queue.submitting_many import ManySubmissions, ManySubmissionsOneByOne, New
from streamq.records.keys import MADE
from streamq.settings import Settings, url_with_login

#: The options of ``submit`` that many requests can share.
_OF_MANY = frozenset(
    (
        "queue",
        "level",
        "limit",
        "rate",
        "delay",
        "start_at",
        "retries",
        "backoff",
        "timeout",
        "max_failures",
        "keep",
        "poison",
        "labels",
        "weight",
        "canary",
        "deadline",
        "then",
        "on_failure",
        "finally_",
        "key",
        "track",
        "trace",
    )
)


class Client:
    """Submit requests to a server, find them again and list them.

    A URL that begins with ``https://`` or ``http://`` is that of a gateway (``streamq serve``); the
    setting ``key`` is the key for it.

    Threads may share a client. Close it, or use it in a ``with`` statement.

    Example:
        with Client("redis://localhost") as client:
            request = client.submit(["a", "b"], handler="shout")
            print(request.wait().state)
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = PREFIX,
        max_part: str | int = MAX_PART,
        insecure: bool | None = None,
    ) -> None:
        """Connect to the server at the URL, or else at the one that the settings name.

        ``prefix`` begins every key in the server. ``max_part`` is the size of the largest payload.
        ``insecure`` allows a server on another machine that asks for no password.

        Raises:
            SettingsError: no URL is given or set.
            ServerError: the server cannot be used; the subclass says why.
        """
        settings = Settings.from_env()
        url = url or settings.url
        if not url:
            raise SettingsError("which server? Give a URL, or set STREAMQ_URL")
        self._team = settings.team
        self._max_part = units.size_bytes(max_part, "max_part")
        units.name(prefix, "prefix")
        self._gateway: GatewayQueue | None = None
        #: When the workers of a queue were last found to know flows.
        self._checked: dict[str, float] = {}
        if is_gateway(url):
            self._gateway = GatewayQueue(GatewayCalls(url, settings), self._max_part)
            return
        url = url_with_login(url, settings)
        self._protocol = Protocol(Connection(url), prefix)
        try:
            self._protocol.connection.check(
                is_insecure=settings.insecure if insecure is None else insecure
            )
        except StreamqError:
            self.close()
            raise

    def __repr__(self) -> str:
        if self._gateway:
            return f"Client({self._gateway.url!r})"
        prefix = self._protocol.prefix
        more = "" if prefix == PREFIX else f", prefix={prefix!r}"
        return f"Client({self._protocol.connection.where!r}{more})"

    def submit(  # noqa: PLR0913  the options of a request are many and flat
        self,
        payloads: Iterable[Any],
        *,
        handler: str | None = None,
        flow: Flow | None = None,
        id: str | None = None,
        queue: str = "default",
        level: int = LEVEL,
        limit: int = LIMIT,
        rate: str | None = None,
        delay: str | float | None = None,
        start_at: float | None = None,
        retries: int | None = None,
        backoff: str | float = "1s",
        timeout: str | float | None = None,
        max_failures: str | int | None = None,
        keep: str | float = "7d",
        poison: int = POISON,
        durable: int = 0,
        labels: Mapping[str, str] | None = None,
        weight: int = WEIGHT,
        canary: int = 0,
        deadline: str | float | None = None,
        then: Target | None = None,
        on_failure: Target | None = None,
        finally_: Target | None = None,
        key: str | Callable[[Any], Any] = "",
        track: bool = False,
        trace: bool = False,
    ) -> Request:
        """Submit payloads as a request, each as one part, and return the request.

        Bytes are sent as they are, anything else as JSON. ``payloads`` may be any iterable: parts
        run while later ones are still being read. The same call with the same ``id`` makes no
        second request: it finds the first one, and completes it if it was cut short.

        Give either the name of a ``handler`` or a ``flow`` (``App.flow``). Options that a stage of
        the flow sets itself are the stage's; ``limit`` and ``rate`` hold for each stage.

        * ``level``: 0 to 99, 0 first. ``limit``: how many parts run at the same time, at most.
        * ``weight``: 1 to 64, its share among requests of its level: while neither is at its
          limit, a 4 gets half as many turns as an 8.
        * ``rate``: how many parts start, such as ``"100/s"``. ``delay`` (a duration) or
          ``start_at`` (seconds since 1970): nothing runs before.
        * ``retries``, ``backoff``, ``timeout``: of each part; without them the handler decides.
        * ``max_failures``: a number or a share (``"2%"``); more failures end the request.
        * ``keep``: how long results are kept after the end. ``poison``: how many workers a part may
          cost before it is given up. ``durable``: return when so many replicas have everything.
        * ``labels``: up to 8 names and values to find the request by, such as ``{"user": "62"}``.
          They change nothing of what is done, so the same call with others finds the request, too.
        * ``canary``: only so many of the first parts run, until ``Request.release`` is called.
        * ``deadline``: a duration from now, or a date and time. A request that has not ended by
          then fails, with the reason ``deadline``, and keeps its results.
        * ``then``, ``on_failure``, ``finally_``: what is started when the request is done; when it
          failed or was cancelled; in any case. Each is the name of a handler, which is told of the
          end; a ``Start``; or a URL or ``Webhook``, which a worker posts to.
        * ``key``: what ``Request.find`` knows a payload by: the name of a field (``"sku"``,
          ``"user.id"``, ``"."`` for the payload itself), or a function that is called with it.
        * ``track``: of a flow, keep where each item is; ``key`` does so, too. ``trace``: keep also
          what it came to in each stage, in the server's memory.

        Durations are seconds, or text such as ``"90s"``, ``"1h30m"``, ``"7d"``.

        If reading the payloads raises an error, the request is taken back. If the server fails,
        what was submitted stays when an ``id`` was given, so that the same call can go on.

        Raises:
            InvalidValue: an option or a payload that cannot be; nothing is submitted.
            RequestExists: the id is taken by another submission.
            RequestEnded: the request was cancelled, or failed, before all was submitted.
            ServerError: the server cannot be used now.
            ServerBehind: the request is submitted, but not on so many replicas.

        Example:
            lines = (f"line {n}" for n in range(1_000))
            request = client.submit(lines, handler="shout", level=10, limit=4, id="nightly")
        """
        options = _submission_options(
            queue=queue,
            level=level,
            limit=limit,
            rate=rate,
            delay=delay,
            start_at=start_at,
            retries=retries,
            backoff=backoff,
            timeout=timeout,
            max_failures=max_failures,
            keep=keep,
            poison=poison,
            labels=labels,
            weight=weight,
            canary=canary,
            then=then,
            on_failure=on_failure,
            finally_=finally_,
            key=key,
        )
        meant = self._meant(
            handler, flow, options, follow_of_stage(key=key, track=track, trace=trace)
        )
        if deadline is not None:
            meant = callbacks_with_deadline(meant, deadline, "deadline")
        if durable != 0:
            units.whole(durable, "durable", 0)
        # ``list`` is tested first: the others take longer to find out.
        if not isinstance(payloads, list):
            _check_payloads_of_client(payloads)
        request_id = units.request_id(id, self._team)
        if self._gateway:
            return self._gateway.submit(
                payloads, request_id, {"handler": handler, "deadline": deadline, **options}, durable
            )
        refuse_taken_callback_ids(self._protocol, request_id, meant)
        key_of = key if callable(key) else None
        submission = Submission(self._protocol, request_id, meant, self._max_part, key_of)
        submission.run(payloads, can_go_on=id is not None)
        if durable:
            submission.replicate(durable)
        return Request(self._protocol, request_id)

    def submit_many(
        self,
        requests: "Mapping[str, Iterable[Any]] | Iterable[Iterable[Any]]",
        *,
        handler: str,
        **options: Any,
    ) -> "list[Request]":
        """Submit many requests of the same options in few round trips, and return them in order.

        ``requests`` are the payloads of each: a mapping from ids to payloads, or only the payloads,
        and then each request gets an id of its own. The options are those of ``submit``, but for
        ``id``, ``flow`` and ``durable``.

        Up to 200 small requests go together. Each is one by itself all the same: if some cannot be
        submitted, the others are. What was submitted stays, also if the call is interrupted or
        reading a request's payloads raises an error. With ids the same call may be repeated: it
        makes no request twice, and submits what is missing.

        Raises:
            InvalidValue: an option that cannot be; nothing is submitted.
            PartlySubmitted: some requests were not submitted. Its ``errors`` says which, and why;
                ``requests`` has the others. Of a request whose error is ``ServerUnreachable`` it is
                not known: ``submit`` with its id finds it, or submits it.

        Example:
            sent = client.submit_many({"user-1": ["a"], "user-2": ["b", "c"]}, handler="shout")
            print([request.wait().state for request in sent])
        """
        if others := options.keys() - _OF_MANY:
            raise InvalidValue(f"submit_many does not take {sorted(others)[0]}")
        meant = self._meant_of_many(handler, options)
        if isinstance(requests, (str, bytes)) or not isinstance(requests, Iterable):
            raise InvalidValue(f"requests are one {type(requests).__name__}; give a list of them")
        has_ids = isinstance(requests, Mapping)
        items = requests.items() if isinstance(requests, Mapping) else ((None, r) for r in requests)
        asked = [New(units.request_id(each, self._team), payloads) for each, payloads in items]

        def by_itself(request_id: str, payloads: Iterable[Any]) -> None:
            self.submit(payloads, handler=handler, id=request_id, **options)

        many = ManySubmissionsOneByOne(by_itself)
        if not self._gateway:
            many = ManySubmissions(
                self._protocol, meant, self._max_part, by_itself, can_go_on=has_ids
            )
        many.run(asked)
        found = {
            request_id: self._gateway.known(request_id)
            if self._gateway
            else Request(self._protocol, request_id)
            for request_id, _ in asked
            if request_id not in many.errors
        }
        if many.errors:
            raise PartlySubmitted(found, many.errors)
        return list(found.values())

    def _meant_of_many(self, handler: str, options: dict[str, Any]) -> Policy:
        """Return the policy that ``submit`` makes of these options, and refuse what it refuses."""
        given = {**options}
        follow = follow_of_stage(
            key=given.get("key", ""),
            track=given.pop("track", False),
            trace=given.pop("trace", False),
        )
        deadline = given.pop("deadline", None)
        meant = self._meant(handler, None, _submission_options(**given), follow)
        return meant if deadline is None else callbacks_with_deadline(meant, deadline, "deadline")

    def _meant(
        self, handler: str | None, flow: Flow | None, options: dict[str, Any], follow: Follow
    ) -> Policy:
        if (handler is None) == (flow is None):
            raise InvalidValue("give either a handler or a flow")
        if self._gateway and options["key"]:
            raise InvalidValue("a gateway does not take keys; use the URL of the server")
        if flow is None and follow and not options["key"]:
            raise InvalidValue("track and trace are for flows")
        if flow is None:
            return _policy_of_submission({"handler": handler, **options})
        if self._gateway:
            raise InvalidValue("a gateway does not take flows; use the URL of the server")
        meant = flow_policy(flow, options, follow=follow)
        assert meant.flow
        check_fleet(self._protocol, meant.flow, self._checked)
        return meant

    @property
    def protocol(self) -> Protocol:
        """The scripts, on this client's connection.

        Raises:
            InvalidValue: the client speaks to a gateway.
        """
        if self._gateway:
            raise InvalidValue("a gateway does not run scripts; use the URL of the server")
        return self._protocol

    def get(self, request_id: str) -> Request:
        """Return the request with that id.

        Raises:
            RequestUnknown: there is no such request, or it was purged.

        Example:
            client.get("nightly").cancel()
        """
        units.name(request_id, "request id")
        if self._gateway:
            return self._gateway.get(request_id)
        request = Request(self._protocol, request_id)
        keep_registered(self._protocol, request.status())
        return request

    def list(self, queue: str = "default", *, ended: bool = False) -> "list[Status]":
        """Return the status of the queue's unfinished requests, or of the ended ones, oldest first.

        Example:
            failed = [each.id for each in client.list(ended=True) if each.state == "failed"]
        """
        units.name(queue, "queue")
        if self._gateway:
            return self._gateway.list(queue, ended=ended)
        ids = self._protocol.ids(queue)
        if ended:
            # Requests among the open ones may have ended since the janitor last looked.
            ids = [*self._protocol.ids(queue, closed=True), *ids]
        found = []
        for request_id in dict.fromkeys(ids):
            # It was registered and never opened, or just purged; or nobody can read it.
            with suppress(RequestUnknown, Damaged):
                found.append(Request(self._protocol, request_id).status())
        kept = [status for status in found if status.state.is_live != ended]
        return sorted(kept, key=lambda status: (status.created_ms, status.id))

    def close(self) -> None:
        """Close the connections."""
        if self._gateway:
            self._gateway.close()
            return
        self._protocol.connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _submission_options(  # noqa: PLR0913  the options of a request are many and flat
    *,
    queue: str = "default",
    level: int = LEVEL,
    limit: int = LIMIT,
    rate: str | None = None,
    delay: str | float | None = None,
    start_at: float | None = None,
    retries: int | None = None,
    backoff: str | float = "1s",
    timeout: str | float | None = None,
    max_failures: str | int | None = None,
    keep: str | float = "7d",
    poison: int = POISON,
    labels: Mapping[str, str] | None = None,
    weight: int = WEIGHT,
    canary: int = 0,
    then: Target | None = None,
    on_failure: Target | None = None,
    finally_: Target | None = None,
    key: str | Callable[[Any], Any] = "",
) -> dict[str, Any]:
    """Return options of a request, for ``policy``."""
    if start_at is not None:
        if delay is not None:
            raise InvalidValue("give either delay or start_at")
        delay = max(0.0, units.moment_s(start_at, "start_at") - time.time())
    return {
        "queue": queue,
        "level": level,
        "limit": limit,
        "weight": weight,
        "canary": canary,
        "calls": callbacks_of(
            queue=queue, keep=keep, then=then, on_failure=on_failure, finally_=finally_
        ),
        "rate": rate,
        "delay": delay,
        "retries": retries,
        "backoff": backoff,
        "timeout": timeout,
        "max_failures": max_failures,
        "keep": keep,
        "poison": poison,
        "key": MADE if callable(key) else key,
        # As a tuple they can be a part of the cache's key.
        "labels": units.labels(labels) if labels is not None else (),
    }


def _check_payloads_of_client(payloads: object) -> None:
    """Raise InvalidValue for what is one payload, or would be taken for something else."""
    kind = type(payloads).__name__
    if isinstance(payloads, Mapping):
        raise InvalidValue(
            f"payloads are one {kind}, of which only the keys would be submitted; "
            f"give a list of payloads: [{{...}}], or list(payloads.items())"
        )
    if isinstance(payloads, (str, bytes)) or not isinstance(payloads, Iterable):
        raise InvalidValue(f"payloads are one {kind}; give a list of them")


def _policy_of_submission(options: dict[str, Any]) -> Policy:
    try:
        return _cached_policy(**options)
    except TypeError:
        # An option that cannot be hashed cannot be cached. This raises the proper error.
        return policy_of_options(**options)


#: Most requests of a program have the same options.
_cached_policy = lru_cache(64, typed=True)(policy_of_options)

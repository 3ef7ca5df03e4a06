"""``streamq find``."""

from collections.abc import Iterable
from itertools import chain
from typing import Annotated

import msgspec
import typer

from streamq.errors import InvalidValue
from streamq.protocol.protocol import Protocol
from streamq.queue.find import Item, ItemPart, ItemStage, find_item, requests_with_item
from streamq.records.keys import key_name

from .. import render
from ..connecting import connected, naming_request
from ..finding import FoundPlace, place_of_queue, place_of_request
from ..shared_options import JsonOption, PrefixOption, QueueOption, UrlOption

#: The most requests with the item, or the most items of one request, that are shown.
_MOST_SHOWN = 10
#: How many children that are not done are named in a line.
_MOST_NAMED = 3
_MOST_CHARS = 120
#: Nothing was found.
_NOT_FOUND = 5


def find(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID] [FIELD=VALUE]",
            help="The request, and the key to look for. Without a request all of the queue are "
            "searched, the newest first.",
        ),
    ] = None,
    flow: Annotated[
        str,
        typer.Option(metavar="NAME", help="Only requests of this flow.", show_default="all"),
    ] = "",
    item: Annotated[
        str,
        typer.Option(
            metavar="N[/CHILD]",
            help="Look for the input of this number, or for a child of it, instead of a key.",
            show_default="none",
        ),
    ] = "",
    queue: QueueOption = "default",
    as_json: JsonOption = False,
    url: UrlOption = None,
    prefix: PrefixOption = None,
) -> None:
    """Tell where one record is, and what became of it in each stage of its flow.

    The request has to be loaded with --key FIELD. With --trace it also keeps what each stage
    returned. It changes nothing, and exits with 5 if there is no such record.

        streamq find --flow shop sku=B-62
    """
    request_id, name, value = _read_find_arguments(words or [])
    if bool(item) == bool(name):
        raise InvalidValue("find what? Give FIELD=VALUE, such as sku=B-62, or ID --item N")
    place = place_of_queue(url, prefix, queue)
    if item or request_id:
        place = place_of_request(request_id or None, url, prefix, queue=queue)
    with connected(place.url, place.prefix) as protocol:
        if item:
            with naming_request(place.ids[0]):
                found = [find_item(protocol, place.ids[0], None, item)]
        else:
            ids = (
                [request_id]
                if request_id
                else _requests_to_find_in(protocol, place, name, value, flow)
            )
            found = [_find_in_request(protocol, each, name, value) for each in ids[:_MOST_SHOWN]]
            if len(ids) > _MOST_SHOWN:
                render.note(f"{len(ids):,} requests have it; the newest {_MOST_SHOWN} are shown")
    items = [each for each in found if each]
    if as_json:
        render.as_json(items)
    elif items:
        more = chain.from_iterable(_inputs_with_same_key(protocol, each) for each in items)
        render.data("\n\n".join(_found_item_text(each) for each in [*items, *more]))
    if not items:
        what = f"item {item}" if item else f"{name}={value}"
        where = f"request {place.ids[0]}" if place.ids else f"the requests of queue {place.queue}"
        render.error(f"nothing found: no {what} in {where}{f' of flow {flow}' if flow else ''}")
        raise typer.Exit(_NOT_FOUND)


def _read_find_arguments(words: list[str]) -> tuple[str, str, str]:
    """Return the request, the name of the key, and its value, as far as they were given."""
    request_id = name = value = ""
    for word in words:
        if "=" in word and not name:
            name, _, value = word.partition("=")
            key_name(name, "the key")
        elif not request_id and "=" not in word:
            request_id = word
        else:
            raise InvalidValue(f"{word!r}: give one request and one FIELD=VALUE")
    return request_id, name, value


def _requests_to_find_in(
    protocol: Protocol, place: FoundPlace, name: str, value: str, flow: str
) -> list[str]:
    """Return the requests of a queue, or the run of this folder, that have the key."""
    ids: Iterable[str] = place.ids
    if not place.ids:
        pages = (protocol.newest(place.queue, closed=closed, page=500) for closed in (False, True))
        ids = dict.fromkeys(each for each in chain.from_iterable(pages) if "/" not in each)
    return requests_with_item(protocol, list(ids), name, value, flow)


def _find_in_request(protocol: Protocol, request_id: str, name: str, value: str) -> Item | None:
    with naming_request(request_id):
        kept = protocol.inspect(request_id).optional_text("key")
        if kept and kept not in (name, "key", "."):
            raise InvalidValue(f"request {request_id} finds records by {kept}, not by {name}")
        return find_item(protocol, request_id, value)


def _inputs_with_same_key(protocol: Protocol, item: Item) -> list[Item]:
    """Return the other inputs with the same key."""
    if not item.again:
        return []
    others = item.again[: _MOST_SHOWN - 1]
    render.warning(
        f"{item.request}: {item.key}={item.value} came {len(item.again) + 1:,} times: "
        f"inputs {', '.join([item.item, *others])}"
        f"{', ...' if len(others) < len(item.again) else ''}"
    )
    found = (find_item(protocol, item.request, None, each) for each in others)
    return [msgspec.structs.replace(each, key=item.key, value=item.value) for each in found if each]


def _found_item_text(item: Item) -> str:
    """Return an item and a line for each stage."""
    key = f"  {item.key}={item.value}" if item.key else ""
    head = f"{item.request}  {'input' if '/' not in item.item else 'item'} {item.item}{key}"
    width = max(len(f"{each.number} {each.name}") for each in item.stages)
    lines = [
        f"  {f'{each.number} {each.name}':<{width}}  {_found_stage_text(each)}"
        for each in item.stages
    ]
    return "\n".join(render.clean(line) for line in [head, *lines])


def _found_stage_text(stage: ItemStage) -> str:
    if stage.waits_for:
        return f"waits for {stage.waits_for:,} of {stage.children:,}"
    parts = [each for each in stage.parts if each.where]
    if not parts:
        return render.NOTHING
    if len(parts) == 1 and (stage.kind != "map" or "/" not in parts[0].item):
        children = f"{stage.children:,} {'child' if stage.children == 1 else 'children'}"
        is_spread = stage.kind == "spread" and parts[0].where == "done"
        return _found_part_text(parts[0], f"  {children}" if is_spread else "")
    told = [f"{count:,} {where}" for where, count in stage.counts.items() if where == "done"]
    others = [each for each in parts if each.where != "done"]
    told += [f"{each.item} {_found_part_text(each)}" for each in others[:_MOST_NAMED]]
    if len(others) > _MOST_NAMED:
        told.append(f"{len(others) - _MOST_NAMED:,} more are not done")
    return ", ".join(told)


def _found_part_text(part: ItemPart, more: str = "") -> str:
    is_back = part.where == "retry" and not part.due_ms and part.attempt == 1
    words = {
        "retry": "waiting, given back" if is_back else "in retry",
        "unknown": "not known: load with --key or --track",
    }
    text = words.get(part.where, part.where)
    if part.where == "retry" and not is_back:
        text += f": attempt {part.attempt}"
        text += f", from {render.moment(part.due_ms)}" if part.due_ms else ", at once"
    if part.error:
        text += f": {part.error}: {part.message}" if part.message else f": {part.error}"
    text += more
    if part.result is not msgspec.UNSET:
        value = msgspec.json.encode(part.result).decode()
        text += f"  {value[:_MOST_CHARS]}{' ...' if len(value) > _MOST_CHARS else ''}"
    return text

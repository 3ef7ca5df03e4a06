"""Log lines: whatever is in them, a terminal shows it and obeys nothing."""

import json
import logging
import sys
from typing import Any

import pytest

from streamq import Client
from streamq.telemetry.logs import JsonFormatter, TextFormatter
from tests.conftest import ANY_KIND
from tests.support.fleet import Fleet
from tests.support.waiting import wait_until

EVIL = "\x1b]0;title\x07\x1b[2J\r\0\x9b31m\u202eevil\u2066"


def record(message: str, *words: Any, trace: Any = None) -> logging.LogRecord:
    return logging.LogRecord("streamq", logging.WARNING, "f.py", 1, message, words, trace)


def is_harmless(text: str) -> bool:
    return all(each.isprintable() or each in "\n\t" for each in text)


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_no_character_of_a_message_or_a_traceback_moves_a_cursor(
    formatter: logging.Formatter,
) -> None:
    try:
        raise ValueError(EVIL)
    except ValueError:
        line = formatter.format(record("it says %s", EVIL, trace=sys.exc_info()))

    assert is_harmless(line)
    assert "evil" in line
    assert "ValueError" in line


def test_line_within_a_message_is_no_line_of_the_log() -> None:
    line = TextFormatter().format(record("it says %s", "x\n12:00:00.000 INFO    all is well"))

    first, second = line.splitlines()
    assert first.endswith("it says x")
    assert second == "    12:00:00.000 INFO    all is well"


def test_json_tells_what_was_said() -> None:
    line = JsonFormatter().format(record("it says %s", EVIL))

    assert json.loads(line)["event"] == f"it says {EVIL}"


@ANY_KIND
@pytest.mark.parametrize("form", ["text", "json"])
def test_error_of_a_handler_in_the_log_of_a_worker(fleet: Fleet, client: Client, form: str) -> None:
    pool = fleet.ready("--log-format", form)

    client.submit([EVIL], handler="fails", queue=fleet.queue, retries=0).wait(10)

    wait_until(lambda: "evil" in fleet.errors(pool))
    assert is_harmless(fleet.errors(pool))

"""Call a slow and flaky API for each line, as fast as it likes and no faster."""

import json
import os
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

from streamq import Abandon, App, Retry, Snooze

API = os.environ.get("API", "http://127.0.0.1:8765")

app = App()


@app.map(timeout="30s", retries=5)
def ask(word: str) -> dict[str, Any]:
    """What the API says of a word."""
    try:
        with urlopen(f"{API}/length?word={quote(word)}", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except HTTPError as error:
        if error.code == 429:
            # Nobody of this request asks until then; it costs no attempt.
            raise Snooze(after=float(error.headers["Retry-After"]), scope="request") from None
        # What is our mistake stays one; what is the API's is tried again after a while.
        if 400 <= error.code < 500:
            raise Abandon(f"{error.code} for {word!r}") from None
        raise Retry(f"{error.code} for {word!r}") from None

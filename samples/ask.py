"""Call a slow and flaky API for each line, as fast as the API allows."""

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
    """Return the API's answer for a word."""
    try:
        with urlopen(f"{API}/length?word={quote(word)}", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except HTTPError as error:
        if error.code == 429:
            # No part of this request starts until then. This costs no attempt.
            raise Snooze(after=float(error.headers["Retry-After"]), scope="request") from None
        # 4xx is our mistake, so another try would not help. 5xx is the API's, so try again later.
        if 400 <= error.code < 500:
            raise Abandon(f"{error.code} for {word!r}") from None
        raise Retry(f"{error.code} for {word!r}") from None

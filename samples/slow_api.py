"""An API to practise on: slow, sometimes broken, and with a limit of 20 calls a second.

    python slow_api.py [PORT]

``/length?word=...`` answers with JSON after a moment. Every seventh answer is "503 Service
Unavailable" instead. More than 20 calls in a second get "429 Too Many Requests".
"""

import json
import sys
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

PORT = 8765
TAKES_S = 0.02
MOST_IN_A_SECOND = 20

_lock = threading.Lock()
_asked: deque[float] = deque(maxlen=MOST_IN_A_SECOND)
_answers = 0


class Api(BaseHTTPRequestHandler):
    """Answers one call."""

    def do_GET(self) -> None:
        """Answer a call, or refuse it."""
        global _answers
        with _lock:
            now = time.monotonic()
            is_too_often = len(_asked) == MOST_IN_A_SECOND and now - _asked[0] < 1
            if not is_too_often:
                _asked.append(now)
                _answers += 1
            is_broken = _answers % 7 == 0
        time.sleep(TAKES_S)
        if is_too_often:
            self._say(429, {"error": "not so fast"})
        elif is_broken:
            self._say(503, {"error": "try again"})
        else:
            (word,) = parse_qs(urlsplit(self.path).query).get("word", [""])
            self._say(200, {"word": word, "length": len(word)})

    def _say(self, code: int, answer: dict[str, str | int]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        if code == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if sys.argv[1:] else PORT
    with ThreadingHTTPServer(("127.0.0.1", port), Api) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()

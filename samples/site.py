"""A small web site for crawl.py: pages that link to each other, and one link that is broken."""

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = int(os.environ.get("PORT", "8082"))
PAGES = {
    "/": ("Home", ["/fruit", "/tea", "/gone"]),
    "/fruit": ("Fruit", ["/apple", "/pear"]),
    "/tea": ("Tea", []),
    "/apple": ("Apple", ["/fruit"]),
    "/pear": ("Pear", ["/fruit", "/"]),
}


class Site(BaseHTTPRequestHandler):
    """Answers with the pages."""

    def do_GET(self) -> None:
        """Answer with a page."""
        title, links = PAGES.get(self.path, ("", []))
        body = f"<title>{title}</title>" + "".join(f'<a href="{each}">go</a>' for each in links)
        self.send_response(200 if title else 404)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", PORT), Site).serve_forever()

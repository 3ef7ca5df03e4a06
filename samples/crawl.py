"""Flows: a crawl. Pages are fetched, their links spread, each link is fetched, and the answers of a
page are joined.

The site is `site.py`, on this machine: python site.py &
"""

import os
import re
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import urlopen

from streamq import Abandon, App, Failed, Retry, Spread

SITE = os.environ.get("SITE", "http://127.0.0.1:8082")
app = App()


@app.map(retries=3, timeout="30s")
def fetch(path: str) -> dict[str, str]:
    """Return a page and what is in it."""
    url = urljoin(SITE, path)
    try:
        with urlopen(url, timeout=10) as answer:
            return {"url": url, "body": answer.read().decode()}
    except HTTPError as error:
        if error.code == 503:
            raise Retry("the site is busy") from None
        raise Abandon(f"{url}: {error.code}") from None


@app.map
def links(page: dict[str, str]) -> Spread:
    """Return the links of a page; the page's own URL is kept for the join."""
    found = re.findall(r'href="([^"]+)"', page["body"])
    return Spread([urljoin(page["url"], each) for each in found], keep=page["url"])


@app.map
def title(page: dict[str, str]) -> str:
    """Return the title of a page."""
    found = re.search(r"<title>(.*?)</title>", page["body"])
    return found[1] if found else page["url"]


@app.handler
def gather(url: str, titles: list[str | Failed]) -> dict[str, object]:
    """Return a page with the titles that it links to, and how many links are broken."""
    good = [each for each in titles if isinstance(each, str)]
    return {"page": url, "links_to": good, "broken": len(titles) - len(good)}


crawl = (
    app.flow("crawl")
    .map(fetch, limit=4)
    .spread(links)
    .map(fetch, limit=4)
    .map(title)
    .join(gather, on_failure="run")
)

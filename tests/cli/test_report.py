"""``streamq report``, and ``--ui``."""

import http.client
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from streamq import Client
from tests.conftest import ONE_KIND
from tests.support.command import COMMAND, environment, run
from tests.support.waiting import wait_until


@ONE_KIND
@pytest.mark.commands
def test_report_is_a_file_with_everything_in_it(
    url: str, client: Client, queue: str, request_id: str, tmp_path: Path
) -> None:
    request = client.submit(
        [1, 2], handler="h", queue=queue, id=request_id, labels={"a": "</script>"}
    )
    request.cancel()
    file = tmp_path / "r.html"
    words = ("report", request_id, "-o", str(file), "--url", url)
    assert run(*words).returncode == 0
    text = file.read_text()
    assert text.count("</script>") == 3  # the import map, the data, the start: none in the data
    assert '"state":"cancelled"' in text
    assert not re.search(r'(?:src|href)="?https?:', text)
    assert run(*words).returncode == 2
    assert run(*words, "--force").returncode == 0
    assert run("report", "never-was", "-o", str(tmp_path / "x"), "--url", url).returncode == 5


def get(port: int, path: str, cookie: str = "") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers={"Cookie": cookie} if cookie else {})
    found = connection.getresponse()
    found.read()
    connection.close()
    return found


@pytest.mark.long
def test_run_with_ui_lets_one_browser_in(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("import time\ndef f(x):\n    time.sleep(0.5)\n    return x\n")
    (tmp_path / "in.txt").write_text("a\n" * 2_000)
    words = ("run", "in.txt", "--map", "f.py:f", "-o", "out.jsonl", "-c", "1", "--ui")
    ran = subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        assert ran.stderr
        line = next(line for line in ran.stderr if "watch it at" in line)
        found = re.search(r"http://\S+", line)
        assert found
        place = urlsplit(found[0])
        port = place.port or 0
        assert wait_until(lambda: get(port, "/v1/me").status, 20) == 401
        entered = get(port, place.path)
        assert entered.status == 303
        cookie = (entered.getheader("set-cookie") or "").partition(";")[0]
        # It leads to the request of the run, which is there also when it has ended.
        request_id = (entered.getheader("location") or "").removeprefix("/r/")
        wait_until(lambda: get(port, f"/v1/requests/{request_id}", cookie).status == 200, 20)
        assert get(port, "/v1/me", cookie).status == 200
        assert get(port, place.path).status == 401
        assert get(port, "/v1/me", "streamq_ui=x").status == 401
    finally:
        ran.terminate()
        ran.communicate(timeout=60)

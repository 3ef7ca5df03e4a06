"""The command, for flows that are loaded from files."""

import pytest

from tests.support.command import Ran, Streamq, run
from tests.support.secure import as_role


@pytest.fixture
def streamq(url: str, queue: str) -> Streamq:
    """Runs the command with the server and queue of the test in its environment."""

    def streamq(*words: str, **variables: str) -> Ran:
        own = as_role(url, words[0])
        return run(*words, **{"STREAMQ_URL": own, "STREAMQ_QUEUE": queue, **variables})

    return streamq

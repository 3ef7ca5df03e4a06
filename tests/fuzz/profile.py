"""How many examples are tried, and what garbage is made of.

Without ``STREAMQ_FUZZ_EXAMPLES`` they are few and always the same; with it they are so many,
and others each time.
"""

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

_ASKED = os.environ.get("STREAMQ_FUZZ_EXAMPLES", "")
#: Whether it is for the garbage alone that this is run.
IS_ASKED = bool(_ASKED)


def fuzz(few: int = 60) -> settings:
    """The number of examples of a test: few in CI, or with 0 only those it names itself."""
    explicit = [] if _ASKED or few else [Phase.explicit]
    return settings(
        max_examples=int(_ASKED) if _ASKED else few or 1,
        phases=explicit or list(Phase),
        derandomize=not _ASKED,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


#: What people, programs and broken disks put where something else belongs.
ODD_TEXTS = (
    *("", " ", "0", "-1", "1.5", "nan", "inf", "-inf", "1e308", "1e400", "-0", "0x10", "1_000"),
    *(
        "9" * 30,
        "9" * 305,
        "9" * 400,
        "9" * 5_000,
        "٣",
        "\x00",
        "a\x00b",
        "\n",
        "é",
        "\udcff",
        "null",
    ),
    *("{}", "[]", "[[]]", '{"a":', '"', "'", "%", "%%", "../..", "a" * 65, "{r:x}:meta", "true"),
)
texts = st.sampled_from(ODD_TEXTS) | st.text(max_size=40)
numbers = st.integers() | st.floats() | st.sampled_from([2**31, 2**53, 2**63, 2**64, 10**400])
anything = texts | numbers | st.none() | st.booleans() | st.binary(max_size=20)
garbage = st.sampled_from([text.encode("utf-8", "surrogateescape") for text in ODD_TEXTS]) | (
    st.binary(max_size=60)
)

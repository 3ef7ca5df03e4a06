"""Decides which runs keep bytes away from their server. Needs no redis-py.

Where it can, a run hands out parts by reference: its processes read the input themselves. And they
write results to spools in the run's folder, from which the collector copies them to the output.
The server then has references, leases and counts only.
"""

import os
import stat
from contextlib import closing
from pathlib import Path

import msgspec

from streamq.errors import InvalidValue, StreamqError
from streamq.model import Policy
from streamq.records import spool
from streamq.records.arrow_tables import TABLE_FORMATS
from streamq.records.inputs import STDIN, open_input
from streamq.records.names import absolute_file_name
from streamq.records.remote import is_remote
from streamq.runs.plan import Plan

#: Formats of input whose parts are the same bytes in the file and in the server.
_FORMATS = ("lines", "jsonl", "csv", *TABLE_FORMATS)
#: More links in a row lead nowhere (Linux: 40).
_MOST_LINKS = 40


def spooled_plan(plan: Plan, *, is_wanted: bool) -> Plan:
    """Return the plan with parts by reference and spooled results, if all of it allows that.

    Runs of tables spool in any case: their parts are by reference, and results of a table may be
    larger than what the server takes.
    The server is the run's own, there is no flow and no key, the output is a file whose lines do
    not depend on each other, and the input is made of local files that are read as they are.
    """
    policy, spec = plan.policy, plan.policy.spec
    if not is_wanted and spec.format not in TABLE_FORMATS:
        return plan
    can_spool = not plan.server and not plan.is_piped and plan.form in spool.FORMS
    if not can_spool or policy.flow or policy.key or spec.format not in _FORMATS or spec.encoding:
        return plan
    if not all(map(_is_input_to_spool, spec.files)):
        return plan
    spec = msgspec.structs.replace(spec, by_reference=True)
    policy = msgspec.structs.replace(policy, spec=spec)
    return msgspec.structs.replace(plan, policy=policy, spools=True)


def policy_with_spools(policy: Policy, folder: str, form: str, request_id: str) -> Policy:
    """Return the policy of a request whose workers keep results in a folder that they share.

    The folder of the request is made in it.

    Raises:
        InvalidValue: parts are not by reference, or there is no such folder or form.
    """
    spec = policy.spec
    if not spec.by_reference or policy.flow:
        raise InvalidValue(
            "--spool goes with --by-reference, and with no flow: what is lost of a spool is made "
            "again of the input"
        )
    if form not in spool.FORMS:
        raise InvalidValue(f"--spool-format {form!r} is none of {', '.join(spool.FORMS)}")
    place = Path(absolute_file_name(folder, "--spool"))
    if not place.is_dir():
        raise InvalidValue(f"--spool {folder}: there is no such folder")
    try:
        (place / request_id).mkdir(exist_ok=True)
    except OSError as error:
        raise InvalidValue(f"--spool {folder}: {error.strerror}") from None
    spec = msgspec.structs.replace(spec, spool=str(place / request_id), spool_form=form)
    return msgspec.structs.replace(policy, spec=spec)


def _is_spooled_name_of_descriptor(name: str) -> bool:
    """Return whether a name means another file in each process, as /dev/stdin does."""
    path = Path(name)
    for _ in range(_MOST_LINKS):
        path = path.parent.resolve() / path.name
        if path.is_relative_to("/proc") or path.is_relative_to("/dev/fd"):
            return True
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()
    return True


def _is_input_to_spool(name: str) -> bool:
    """Return whether a file is a regular one with bytes that are read as they are."""
    if name == STDIN or is_remote(name) or _is_spooled_name_of_descriptor(name):
        return False
    try:
        state = os.stat(name)  # noqa: PTH116  names are no paths yet
        # Files that the system makes up while they are read, as in /proc, have the size 0.
        if not stat.S_ISREG(state.st_mode) or not state.st_size:
            return False
        with closing(open_input(name)) as source:
            return not source.is_compressed
    except (OSError, StreamqError):
        return False

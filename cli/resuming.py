"""Tells the user how to resume a run that was stopped. Needs no redis-py."""

from streamq.records.inputs import STDIN
from streamq.runs.plan import Plan
from streamq.runs.stored_runs import retry_command


def resume_command(plan: Plan, *, is_retry: bool = False) -> str:
    """Return the command that continues the run, or its retry."""
    if is_retry:
        return retry_command(plan.id)
    has_stdin = STDIN in plan.policy.spec.files
    same = " with the same standard input" if has_stdin else ""
    return f"streamq run --resume {plan.id}{same}"


def resume_hint(plan: Plan, *, is_kept: bool, is_retry: bool = False) -> str:
    """Return the end of a message about a run that was stopped."""
    if is_kept:
        return f"; nothing is lost\ngo on with: {resume_command(plan, is_retry=is_retry)}"
    return "; a run that writes to a pipe cannot be resumed"

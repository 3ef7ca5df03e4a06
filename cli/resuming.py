"""What people are told of a run that was stopped. The driver is not needed to say it."""

from streamq.records.inputs import STDIN
from streamq.runs.plan import Plan


def resume_command(plan: Plan) -> str:
    """Return what goes on with the run."""
    has_stdin = STDIN in plan.policy.spec.files
    same = " with the same standard input" if has_stdin else ""
    return f"streamq run --resume {plan.id}{same}"


def resume_hint(plan: Plan, *, is_kept: bool) -> str:
    """Return what is said of a run that was stopped."""
    if is_kept:
        return f"; nothing is lost\ngo on with: {resume_command(plan)}"
    return "; what goes into a pipe cannot be gone on with"

"""The panels in which the help of a command shows its options."""

INPUT = "Input"
CSV = "CSV files"
FUNCTION = "What to run"
OUTPUT = "Output"
FIND = "Finding one record"
SPEED = "Speed and limits"
FAILURES = "Failures and retries"
CALLBACKS = "When it has ended"
STOPPING = "Stopping and replacing"
SERVER = "Server"
LOGS = "Logs and health"
ARGUMENTS = "Arguments"
OTHERS = "Options"
#: The order of the panels: what a user types in each call comes before what is set once.
ORDER = (
    ARGUMENTS,
    FUNCTION,
    INPUT,
    CSV,
    OUTPUT,
    SPEED,
    FAILURES,
    CALLBACKS,
    FIND,
    STOPPING,
    OTHERS,
    SERVER,
    LOGS,
)

"""The handlers of the fleet: put yours here."""

from streamq import App

app = App()


@app.map
def shout(line: str) -> str:
    """Each line, louder."""
    return line.upper()

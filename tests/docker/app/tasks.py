"""A handler that takes long enough to be killed on the way."""

import time

from streamq import App

app = App()


@app.map
def shout(line: str) -> str:
    time.sleep(0.004)
    return line.upper()

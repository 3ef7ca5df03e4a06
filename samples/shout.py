"""A handler for the parts of ``requests``: each line of that file is a request of its own."""

from streamq import App

app = App()


@app.map
def shout(word: str) -> str:
    """Return the word in capitals."""
    return word.upper()

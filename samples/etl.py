"""Flows: extract, transform, load. Rows of a CSV are checked, priced, and made ready to be loaded:
three steps with limits and retries of their own."""

from streamq import Abandon, App

app = App()
PRICES = {"apple": 0.5, "pear": 0.75, "jam, strawberry": 4.2, "tea": 3.0}


@app.map
def extract(row: dict[str, str]) -> dict[str, object]:
    """Return a row with its numbers as numbers. A bad one fails, with its file and line."""
    try:
        return {"item": row["item"].strip().lower(), "count": int(row["count"])}
    except ValueError as error:
        raise Abandon(f"no order: {error}") from None


@app.map
def transform(order: dict[str, object]) -> dict[str, object] | None:
    """Return the order with its price; orders of nothing drop out."""
    if int(str(order["count"])) < 1:
        return None
    price = PRICES.get(str(order["item"]))
    if price is None:
        raise Abandon(f"no price of {order['item']!r}")
    return order | {"total": round(price * int(str(order["count"])), 2)}


@app.map
def load(order: dict[str, object]) -> str:
    """Return the statement that loads the order; a real one would run it."""
    return f"INSERT INTO orders VALUES ({order['item']!r}, {order['count']}, {order['total']})"


etl = app.flow("etl").map(extract).map(transform, limit=8).map(load, limit=2, rate="1000/s")

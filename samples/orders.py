"""Clean up a CSV: rows are checked by their type, and bad ones are reported with their place."""

import msgspec

from streamq import App

app = App()


class Order(msgspec.Struct):
    """A row of orders.csv."""

    item: str
    count: int
    price: float


@app.map(retries=0)
def clean(order: Order) -> dict[str, str | int | float]:
    """Return the row with its item tidied up and its total added."""
    if order.count <= 0:
        raise ValueError(f"{order.count} of {order.item}")
    total = round(order.count * order.price, 2)
    return {"item": order.item.strip().lower(), "count": order.count, "total": total}

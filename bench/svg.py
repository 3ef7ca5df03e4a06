"""Bars and lines as SVG, readable on a light and on a dark page."""

import math
from collections.abc import Sequence
from html import escape

_FONT = 'font-family="system-ui, sans-serif" font-size="13"'
_OURS, _OTHERS, _LIMIT, _TEXT = "#0a7d5a", "#8899aa", "#c9a227", "#667788"
_COLOURS = ("#0a7d5a", "#c9a227", "#8050a0", "#b04a3a")


def bars(title: str, rows: Sequence[tuple[str, float]], unit: str, limit: str = "") -> str:
    """Draw horizontal bars on a logarithmic scale; ours green, the row named ``limit`` gold."""
    rows = [row for row in rows if row[1] > 0]
    low = 10 ** math.floor(math.log10(min(value for _, value in rows)))
    high = max(value for _, value in rows)
    span = math.log10(high / low) or 1.0
    height = 34 + 24 * len(rows)
    parts = [_head(760, height, title)]
    for index, (name, value) in enumerate(rows):
        y = 34 + 24 * index
        width = max(2.0, 430 * math.log10(value / low) / span)
        colour = _OURS if name == "streamq" else _LIMIT if name == limit else _OTHERS
        parts.append(f'<text x="150" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="158" y="{y}" width="{width:.0f}" height="17" fill="{colour}"/>')
        parts.append(f'<text x="{164 + width:.0f}" y="{y + 13}">{_short(value)} {unit}</text>')
    return "\n".join([*parts, "</svg>\n"])


def lines(
    title: str,
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    axes: tuple[str, str],
) -> str:
    """Draw lines over two logarithmic axes."""
    points = [point for _, line in series for point in line]
    left, right = _decades([x for x, _ in points])
    low, high = _decades([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - left) / (right - left)
        up = (math.log10(y) - low) / (high - low)
        return 80 + 460 * across, 290 - 240 * up

    parts = [_head(760, 340, title)]
    for power in range(left, right + 1):
        x, _ = place(10**power, 10**low)
        parts.append(f'<path d="M{x:.0f} 50V290" stroke="#8884" fill="none"/>')
        parts.append(f'<text x="{x:.0f}" y="308" text-anchor="middle">{_short(10**power)}</text>')
    for power in range(low, high + 1):
        _, y = place(10**left, 10**power)
        parts.append(f'<path d="M80 {y:.0f}H540" stroke="#8884" fill="none"/>')
        parts.append(f'<text x="74" y="{y + 4:.0f}" text-anchor="end">{_short(10**power)}</text>')
    parts.append(f'<text x="310" y="330" text-anchor="middle">{escape(axes[0])}</text>')
    parts.append(f'<text x="80" y="42">{escape(axes[1])}</text>')
    for index, (name, line) in enumerate(series):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in line))
        parts.append(f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
        y = 64 + 20 * index
        parts.append(f'<path d="M556 {y - 4}H576" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="582" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _head(width: int, height: int, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" {_FONT} fill="{_TEXT}">\n'
        f'<text x="10" y="20" font-weight="bold">{escape(title)}</text>'
    )


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low = math.floor(math.log10(min(values)) + 1e-9)
    return low, max(low + 1, math.ceil(math.log10(max(values)) - 1e-9))


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"

"""Draws a dashboard as Grafana would lay it out, from its JSON and the answers of a Prometheus. Needs matplotlib."""

import math
import re

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator  # noqa: E402
from PIL import Image  # noqa: E402

from monitoring import Variables  # noqa: E402

COLUMN_INCHES, LINE_INCHES = 0.62, 0.36
HEADER_LINES = 2
DPI = 96
NUM_POINTS = 300
LEGEND_LINES_MAX = 3
COLORS = ["#3274d9", "#e0752d", "#56a64b", "#e02f44", "#8f3bb8", "#0aa5a5", "#b877d9", "#6e6e6e", "#c4a000", "#7c4a1e"]
STATES = {"green": "#56a64b", "orange": "#ff9830", "red": "#e02f44", "transparent": "#ffffff"}


def scaled(value, units, base):
    """1536, ["B", "KiB"], 1024 -> "1.5 KiB"."""
    power = 0
    while abs(value) >= base and power + 1 < len(units):
        value, power = value / base, power + 1
    return f"{value:.3g} {units[power]}".strip()


def seconds(value):
    for limit, divisor, unit in ((1e-3, 1e-6, "µs"), (1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min")):
        if abs(value) < limit:
            return f"{value / divisor:.3g} {unit}"
    return f"{value / 3600:.3g} h"


FORMATS = {
    "short": lambda v: scaled(v, ["", "k", "M", "G"], 1000),
    "percentunit": lambda v: f"{100 * v:.3g} %",
    "s": lambda v: "0 s" if v == 0 else seconds(v),
    "bytes": lambda v: scaled(v, ["B", "KiB", "MiB", "GiB", "TiB"], 1024),
    "Bps": lambda v: scaled(v, ["B/s", "kB/s", "MB/s", "GB/s"], 1000),
    "ops": lambda v: scaled(v, ["/s", "k/s", "M/s"], 1000),
}


def legend(target, labels):
    return re.sub(r"{{(\w+)}}", lambda m: labels.get(m[1], ""), target["legendFormat"]) or "value"


def curves(panel, variables, prometheus, start, end):
    """(name, times since the start, values) of every series that the panel shows."""
    result = []
    for target in panel["targets"]:
        for labels, points in prometheus.query_range(variables.substitute(target["expr"]), start, end, (end - start) / NUM_POINTS):
            result.append((legend(target, labels), [at - start for at, _ in points], [value for _, value in points]))
    # Of many curves, those that are 0 throughout only cost room in the legend.
    return result if len(result) <= 6 else [c for c in result if any(c[2])] or result


def draw_stat(figure, box, panel, values):
    defaults = panel["fieldConfig"]["defaults"]
    x, y, w, h = box
    last = next((v for v in reversed(values) if math.isfinite(v)), math.nan)
    color = "#9a9a9a"
    for step in defaults["thresholds"]["steps"]:
        if not math.isnan(last) and (step["value"] is None or last >= step["value"]):
            color = STATES[step["color"]]
    figure.add_artist(Rectangle((x, y), w, h, facecolor=color, edgecolor="white", zorder=-1))
    text = "no data" if math.isnan(last) else FORMATS[defaults["unit"]](last)
    if "decimals" in defaults and defaults["unit"] == "percentunit":
        text = f"{100 * last:.{defaults['decimals']}f} %"
    figure.text(x + w / 2, y + h * 0.42, text, ha="center", va="center", fontsize=22, color="white", weight="bold")
    figure.text(x + w * 0.04, y + h * 0.9, panel["title"], ha="left", va="top", fontsize=9.5, color="white", weight="bold")


def draw_graph(figure, box, panel, series, duration):
    defaults = panel["fieldConfig"]["defaults"]
    x, y, w, h = box
    figure.add_artist(Rectangle((x, y), w, h, facecolor="white", edgecolor="#d8d9da", linewidth=0.8, zorder=-1))
    figure.text(x + w * 0.02, y + h * 0.965, panel["title"], ha="left", va="top", fontsize=10, weight="bold", color="#24292e")
    longest = max((len(name) for name, _, _ in series), default=1)
    num_columns = max(1, min(len(series), int(110 * w / (1 / 3)) // (longest + 9)))
    num_lines = min(LEGEND_LINES_MAX, math.ceil(len(series) / num_columns)) if series else 0
    axes = figure.add_axes((x + w * 0.135, y + h * (0.13 + 0.052 * num_lines), w * 0.84, h * (0.72 - 0.052 * num_lines)))
    if defaults["custom"]["stacking"]["mode"] == "normal":
        grid = sorted({at for _, times, _ in series for at in times})
        rows = [[dict(zip(times, values)).get(at, 0.0) for at in grid] for _, times, values in series]
        axes.stackplot(grid, rows, labels=[name for name, _, _ in series], colors=COLORS, alpha=0.75, linewidth=0)
    else:
        for i, (name, times, values) in enumerate(series):
            axes.plot(times, values, label=name, color=COLORS[i % len(COLORS)], linewidth=1.3)
    axes.set_xlim(0, duration)
    bottom, top = axes.get_ylim()
    if defaults.get("min") == 0:
        bottom, top = 0, max(top, 1e-9)
    if all(v == 0 for _, _, values in series for v in values if math.isfinite(v)):
        bottom, top = 0, 1
    axes.set_ylim(bottom, defaults.get("max", top) * (1.02 if "max" in defaults else 1))
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is not None and axes.get_ylim()[0] < step["value"] < axes.get_ylim()[1]:
            axes.axhline(step["value"], color=STATES[step["color"]], linestyle="--", linewidth=1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: FORMATS[defaults["unit"]](v)))
    bottom, top = axes.get_ylim()
    binary = 2.0 ** math.ceil(math.log2((top - bottom) / 5))
    axes.yaxis.set_major_locator(MultipleLocator(binary) if defaults["unit"] == "bytes" else MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{int(v) // 60}:{int(v) % 60:02d}"))
    axes.tick_params(labelsize=7.5, colors="#52585e", length=2)
    axes.grid(color="#ececec", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_color("#d8d9da")
    handles, names = axes.get_legend_handles_labels()
    shown = num_columns * LEGEND_LINES_MAX
    figure.legend(handles[:shown], names[:shown], loc="lower left", bbox_to_anchor=(x + w * 0.02, y + h * 0.005), ncol=num_columns,
                  fontsize=7.5, frameon=False, handlelength=1.1, columnspacing=1.0, handletextpad=0.4, labelspacing=0.2, borderpad=0)


def draw(dashboard, prometheus, start, end, path):
    """Writes a PNG of what the dashboard shows between two times."""
    lines = HEADER_LINES + max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in dashboard["panels"])
    figure = pyplot.figure(figsize=(24 * COLUMN_INCHES, lines * LINE_INCHES), dpi=DPI, facecolor="#f4f5f5")

    def box(at, margin):
        dx, dy = margin / 24, margin / lines
        return (at["x"] / 24 + dx, 1 - (HEADER_LINES + at["y"] + at["h"]) / lines + dy, at["w"] / 24 - 2 * dx, at["h"] / lines - 2 * dy)

    figure.text(0.006, 1 - 0.9 / lines, dashboard["title"], fontsize=17, weight="bold", va="center", color="#24292e")
    figure.text(0.994, 1 - 0.9 / lines, "time since the start of the run, m:ss", fontsize=9, va="center", ha="right", color="#52585e")
    variables = Variables(dashboard, prometheus, end)
    for panel in dashboard["panels"]:
        x, y, w, h = box(panel["gridPos"], 0.06)
        if panel["type"] == "row":
            figure.text(x + 0.002, y + h / 2, panel["title"], fontsize=12, weight="bold", va="center", color="#24292e")
            continue
        series = curves(panel, variables, prometheus, start, end)
        if panel["type"] == "stat":
            draw_stat(figure, (x, y, w, h), panel, series[0][2] if series else [])
        else:
            draw_graph(figure, (x, y, w, h), panel, series, end - start)
    figure.savefig(path, facecolor=figure.get_facecolor())
    pyplot.close(figure)
    # A picture of few colours: a palette makes it a fraction of the size.
    Image.open(path).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)

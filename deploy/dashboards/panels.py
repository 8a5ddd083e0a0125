"""Panels in Fovea's house style: one function a kind of panel, typed by Grafana's own builders.

Knows queries' shape, units and looks. Does not know which metrics there are: the dashboards say that.
"""

import re
from collections.abc import Mapping

from grafana_foundation_sdk.builders import barchart, bargauge, common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import heatmap as heatmaps
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
# Every series of the chosen processes. `instance` depends on model, namespace and pod: the chain of variables filters
# without a join, and works where there are no pods.
CHOSEN = 'instance=~"$instance"'
QUANTILES = (0.5, 0.9, 0.95, 0.99)
PANEL_HEIGHT = 8
STAT_HEIGHT = 4


def series(metric: str, matchers: str = "") -> str:
    """A selector of `metric` for the chosen processes, as `fovea_ready{instance=~"$instance"}`."""
    return f"{metric}{{{CHOSEN}{', ' + matchers if matchers else ''}}}"


def rate(metric: str, matchers: str = "", *, by: str = "") -> str:
    """Sum over processes of a counter's rate per second, kept apart by the labels `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate({series(metric, matchers)}[$__rate_interval]))"


def quantile(level: float, histogram: str) -> str:
    """The quantile `level` of a classic histogram over all chosen processes."""
    return f"histogram_quantile({level:g}, {rate(f'{histogram}_bucket', by='le')})"


def ratio(part: str, whole: str) -> str:
    """`part / whole`, and no value while `whole` is zero."""
    return f"{part} / ({whole} > 0)"


def graph(
    title: str,
    queries: Mapping[str, str],
    *,
    unit: str,
    description: str,
    span: int = 8,
    minimum: float | None = 0,
) -> timeseries.Panel:
    """Lines over time, from `minimum` up (`None`: as the data say).

    `queries`: legend (may name labels, as `{{reason}}`) to expression.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .fill_opacity(10)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(legend_below())
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        .height(PANEL_HEIGHT)
        .span(span)
    )
    if minimum is not None:
        panel.min(minimum)
    for index, (legend, expression) in enumerate(queries.items()):
        panel.with_target(query(expression, legend, chr(ord("A") + index)))
    return panel


def quantiles(title: str, histogram: str, *, description: str, unit: str = "s", span: int = 8) -> timeseries.Panel:
    """p50, p90, p95, p99 and the mean of a histogram."""
    queries = {f"p{level * 100:g}": quantile(level, histogram) for level in QUANTILES}
    queries["mean"] = ratio(rate(f"{histogram}_sum"), rate(f"{histogram}_count"))
    return graph(title, queries, unit=unit, description=description, span=span)


def stacked(title: str, queries: Mapping[str, str], *, unit: str, description: str, span: int = 8) -> timeseries.Panel:
    """Like `graph`, the series stacked on each other."""
    panel = graph(title, queries, unit=unit, description=description, span=span)
    return panel.fill_opacity(40).stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))


def heatmap(title: str, histogram: str, *, unit: str, description: str, span: int = 8) -> heatmaps.Panel:
    """How a histogram's observations spread over its buckets, over time. `unit` is that of the observations."""
    increase = f"sum by (le) (increase({series(f'{histogram}_bucket')}[$__rate_interval]))"
    return (
        heatmaps.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .calculate(False)
        .y_axis(heatmaps.YAxisConfig().unit(unit).axis_placement(common_models.AxisPlacement.LEFT))
        .color(
            heatmaps.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Blues")
            .steps(64)
            .reverse(False)
            .fill("dark-blue")
            .exponent(0.5)
        )
        .show_value(common_models.VisibilityMode.NEVER)
        .filter_values(heatmaps.FilterValueRange().le(1e-9))
        .with_target(query(increase, "{{le}}", "A").format(PromQueryFormat.HEATMAP))
        .height(PANEL_HEIGHT)
        .span(span)
    )


def number(
    title: str, expression: str, *, unit: str, description: str, thresholds: Mapping[float | None, str] | None = None
) -> stat.Panel:
    """One number, an eighth of the width. `thresholds`: from this value on (`None`: from the start) this colour."""
    steps = thresholds or {None: "text"}
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(
            builders.ThresholdsConfig()
            .mode(models.ThresholdsMode.ABSOLUTE)
            .steps([models.Threshold(value=value, color=color) for value, color in steps.items()])
        )
        .with_target(query(expression, title, "A"))
        .height(STAT_HEIGHT)
        .span(3)
    )


def bars(title: str, expression: str, legend: str, *, unit: str, description: str, span: int = 8) -> bargauge.Panel:
    """One horizontal bar a series, of the newest values."""
    return (
        bargauge.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .display_mode(common_models.BarGaugeDisplayMode.BASIC)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(query(expression, legend, "A").instant())
        .height(PANEL_HEIGHT)
        .span(span)
    )


def stacked_bars(
    title: str, expression: str, *, bar: str, part: str, unit: str, description: str, span: int = 16
) -> barchart.Panel:
    """One horizontal bar for each value of the label `bar`, stacked of the values of the label `part`, now."""
    table = query(expression, "", "A").instant().format(PromQueryFormat.TABLE)
    matrix = models.DataTransformerConfig(
        id_val="groupingToMatrix",
        options={"columnField": part, "rowField": bar, "valueField": "Value", "emptyValue": "null"},
    )
    return (
        barchart.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .unit(unit)
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .stacking(common_models.StackingMode.NORMAL)
        .show_value(common_models.VisibilityMode.NEVER)
        # The matrix calls its first column by both labels.
        .x_field(f"{bar}\\{part}")
        .fill_opacity(80)
        .legend(legend_below())
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        .with_target(table)
        .with_transformation(matrix)
        .height(PANEL_HEIGHT + 2)
        .span(span)
    )


def legend_below() -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
    )


def query(expression: str, legend: str, reference: str) -> prometheus.Dataquery:
    """One query of a panel, over the dashboard's time range."""
    return (
        prometheus.Dataquery()
        .datasource(DATASOURCE)
        .expr(re.sub(r"\s+", " ", expression))
        .range()
        .legend_format(legend)
        .ref_id(reference)
    )

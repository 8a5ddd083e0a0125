"""Reads PromQL as Prometheus does: the selectors of an expression. Knows nothing of which series there are."""

from collections.abc import Iterator
from typing import Any

import promql_parser


def nodes(expression: Any) -> Iterator[Any]:
    """All nodes of a parsed query."""
    yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        if (child := getattr(expression, name, None)) is not None:
            yield from nodes(child)
    for child in getattr(expression, "args", None) or ():
        yield from nodes(child)


def vector_selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """Each selector of a query, from left to right."""
    return [node for node in nodes(promql_parser.parse(expression)) if isinstance(node, promql_parser.VectorSelector)]


def metric_names(expression: str) -> set[str]:
    """Every metric that a query reads."""
    return {str(selector.name) for selector in vector_selectors(expression)}


def bare(selector: promql_parser.VectorSelector) -> str:
    """A selector as a query of its own, without range and offset."""
    operators = {"MatchOp.Equal": "=", "MatchOp.NotEqual": "!=", "MatchOp.Re": "=~", "MatchOp.NotRe": "!~"}
    matchers = ", ".join(f'{m.name}{operators[str(m.op)]}"{m.value}"' for m in selector.matchers.matchers)
    return f"{selector.name}{{{matchers}}}"

"""Conversations about a bar chart. Draws nothing."""

from __future__ import annotations

import random

from training.charts import Bar, Chart
from training.dialogue import ask, say
from training.sample import Turn

_BARS = "[bar|bar|bar|column]"


_CHART = "[chart|chart|graph|bar chart|diagram|picture|image|plot]"


def talk_chart(rng: random.Random, chart: Chart, turns: int) -> list[Turn]:
    """`turns` different questions about the chart."""
    makers = [_extreme, _extreme, _extreme_value, _number, _versus, _colour_of]
    if chart.has_values:
        makers += [_value, _value, _value, _whose]
    said: list[Turn] = []
    if rng.random() < 0.05:
        answer = f"I see a bar chart with {len(chart.bars)} bars."
        said.append(Turn(question=ask(rng, "describe"), answer=answer, expected=(), category="general"))
    for _ in range(4 * turns):
        turn = rng.choice(makers)(rng, chart)
        if turn is not None and all(turn.question != earlier.question for earlier in said):
            said.append(turn)
            if len(said) >= turns:
                break
    return said


def _turn(question: str, answer: str, expected: str) -> Turn:
    return Turn(question=question, answer=answer, expected=(expected,), category="chart")


def _named(rng: random.Random, chart: Chart, bar: Bar) -> str:
    """How a question calls the bar."""
    if bar.label is None or (chart.has_colours and rng.random() < 0.15):
        return f"the {bar.colour} [bar|bar|bar|column|one]"
    label = bar.label if rng.random() < 0.9 else bar.label.lower()
    quoted = rng.choice((label, label, label, label, f'"{label}"', f"'{label}'"))
    return rng.choice(
        (
            "{}",
            "{}",
            "[bar|column] {}",
            "the [bar|column] [|labeled |labelled |called |named |for ]{}",
            "the {} [bar|bar|column]",
        )
    ).format(quoted)


def _extremes(rng: random.Random, chart: Chart) -> tuple[Bar, str] | None:
    """The highest or lowest bar, where there is just one, and "highest" or "lowest"."""
    is_high = rng.random() < 0.6
    ordered = sorted(chart.bars, key=lambda bar: bar.value, reverse=is_high)
    if not _differ(chart, ordered[0], ordered[1]):
        return None
    return ordered[0], "highest" if is_high else "lowest"


def _differ(chart: Chart, one: Bar, other: Bar) -> bool:
    """Whether an eye sees which of the two is higher."""
    return abs(one.value - other.value) * 12 >= max(bar.value for bar in chart.bars)


_SUPERLATIVES = {
    "highest": "[tallest|highest|largest|biggest|greatest|longest]",
    "lowest": "[shortest|lowest|smallest]",
}


_MOST = {
    "highest": "[highest|largest|greatest|biggest|maximum|top]",
    "lowest": "[lowest|smallest|least|minimum]",
}


_VERDICTS = {"highest": "tallest", "lowest": "shortest"}


def _extreme(rng: random.Random, chart: Chart) -> Turn | None:
    found = _extremes(rng, chart)
    if found is None:
        return None
    bar, kind = found
    if bar.label is None or (chart.has_colours and rng.random() < 0.12):
        question = say(
            rng,
            (
                f"[What|Which] colo[u|]r is the {{most}} {_BARS}?",
                f"What is the colo[u|]r of the {{most}} {_BARS}?",
                f"[What|Which] colo[u|]r {_BARS} is the {{most}}?",
            ),
            (f"[what|which] colo[u|]r the {{most}} {_BARS} is",),
            most=_SUPERLATIVES[kind],
        )
        return _turn(question, f"The {_VERDICTS[kind]} bar is {bar.colour}.", bar.colour)
    question = say(
        rng,
        (
            f"[What|Which] {_BARS} is [the |]{{most}}?",
            f"[What|Which] {_BARS} is the {{most}}[| in the {_CHART}| in this {_CHART}| of all]?",
            "[What|Which] [category|bar|label|item|entry|one|group|column] has the {value} [value|"
            "value|number|amount|count|score]?",
            f"What is the [label|name] of the {{most}} {_BARS}?",
            f"What is the {{most}} {_BARS}[| called]?",
            "[Which|Who|What] [has|shows|reaches|got] the [most|highest value|largest value]?"
            if kind == "highest"
            else "[Which|Who|What] [has|shows|got] the [least|lowest value|smallest value]?",
            f"[Name|Identify|Give] the {{most}} {_BARS}.",
            "[Which|What] [category|label|bar] is the {most}[| one]?",
            "Where is the value {value}?",
        ),
        (f"[which|what] {_BARS} is the {{most}}", "which [category|label|bar] has the {value} value"),
        most=_SUPERLATIVES[kind],
        value=_MOST[kind],
    )
    return _turn(question, f"The {_VERDICTS[kind]} bar is {bar.label.upper()}.", bar.label)


def _extreme_value(rng: random.Random, chart: Chart) -> Turn | None:
    found = _extremes(rng, chart)
    if found is None or not chart.has_values:
        return None
    bar, kind = found
    question = say(
        rng,
        (
            f"What is the {{value}} value[| in the {_CHART}| shown]?",
            f"What [value|number] does the {{most}} {_BARS} [have|show|reach]?",
            f"What is the value of the {{most}} {_BARS}?",
            f"How [high|tall|large|long|big] is the {{most}} {_BARS}?",
        ),
        ("what the {value} value is", f"the value of the {{most}} {_BARS}"),
        most=_SUPERLATIVES[kind],
        value=_MOST[kind],
    )
    return _turn(question, f"Its value is {bar.value}.", str(bar.value))


def _value(rng: random.Random, chart: Chart) -> Turn | None:
    bar = rng.choice(chart.bars)
    question = say(
        rng,
        (
            "What is the value of {bar}?",
            "What is the value [of|for|at] {bar}?",
            "What's the [value|number] [of|for] {bar}?",
            "[What|Which] value does {bar} [have|show|reach|represent]?",
            "[What|Which] number does {bar} [have|show|reach]?",
            "How [high|tall|big|large|long|much] is {bar}?",
            f"What value is [shown|given] for {{bar}}[| in the {_CHART}]?",
            "How [many|much] does {bar} [have|show]?",
            "[Give|Read|State|Name] the value of {bar}.",
            "Value of {bar}?",
            "How many [are there |]for {bar}?",
            "What does {bar} [stand at|show|equal]?",
        ),
        (
            "the value of {bar}",
            "what value {bar} has",
            "how [high|tall] {bar} is",
            "what the value of {bar} is",
        ),
        bar=_named(rng, chart, bar),
    )
    return _turn(question, f"Its value is {bar.value}.", str(bar.value))


def _whose(rng: random.Random, chart: Chart) -> Turn | None:
    """Which bar has a given value, where just one has."""
    bar = rng.choice(chart.bars)
    if sum(other.value == bar.value for other in chart.bars) > 1:
        return None
    if bar.label is None:
        question = say(
            rng,
            (f"[What|Which] colo[u|]r is the {_BARS} [with|of] [the |]value {{value}}?",),
            value=str(bar.value),
        )
        return _turn(question, f"The bar is {bar.colour}.", bar.colour)
    question = say(
        rng,
        (
            f"[Which|What] {_BARS} has [the|a] value [of |]{{value}}?",
            "[Which|What] [category|bar|label|one] [has|is at|shows|reaches] {value}?",
            f"[Which|What] {_BARS} is {{value}}?",
        ),
        (f"which {_BARS} [has|shows] [the value |]{{value}}",),
        value=str(bar.value),
    )
    return _turn(question, f"The bar is {bar.label.upper()}.", bar.label)


def _number(rng: random.Random, chart: Chart) -> Turn | None:
    question = say(
        rng,
        (
            "How many {bars} are there?",
            f"How many {{bars}} [are there |are |][in|on] [the|this] {_CHART}?",
            f"How many {{bars}} does [the|this] {_CHART} [have|show|contain]?",
            f"How many {{bars}} [do|can] you see[| in the {_CHART}]?",
            "[Count|Please count] the {bars}.",
            "What is the number of {bars}?",
            f"How many {{bars}} [are shown|are drawn|can you count|are displayed][| in the {_CHART}]?",
        ),
        ("how many {bars} there are", "the number of {bars}"),
        bars="[bars|bars|bars|columns|categories]",
    )
    return _turn(question, f"There are {len(chart.bars)} bars.", str(len(chart.bars)))


def _versus(rng: random.Random, chart: Chart) -> Turn | None:
    one, other = rng.sample(chart.bars, 2)
    if not _differ(chart, one, other):
        return None
    more = rng.random() < 0.7
    words = "[taller|higher|larger|bigger|greater|longer|more]" if more else "[shorter|lower|smaller|less]"
    if rng.random() < 0.55:
        question = say(
            rng,
            (
                "Is {one} {words} than {other}?",
                "Is the value of {one} {words} than that of {other}?",
                "Is {one} {words} than {other}?",
                "Does {one} have a [higher|larger|bigger] value than {other}?"
                if more
                else "Does {one} have a [lower|smaller] value than {other}?",
            ),
            ("if {one} is {words} than {other}",),
            one=_named(rng, chart, one),
            other=_named(rng, chart, other),
            words=words,
        )
        is_so = (one.value > other.value) == more
        return _turn(question, "Yes, it is." if is_so else "No, it is not.", "yes" if is_so else "no")
    if one.label is None or other.label is None:
        return None
    question = say(
        rng,
        (
            "[Which|What] is {words}, {one} or {other}?",
            "[Which|What] [bar|column|one] is {words}: {one} or {other}?",
            "[Which|What] has the {words} value, {one} or {other}?",
        ),
        one=one.label,
        other=other.label,
        words=words.replace("|more]", "]").replace("|less]", "]"),
    )
    winner = one if (one.value > other.value) == more else other
    assert winner.label is not None
    return _turn(question, f"The {'taller' if more else 'shorter'} bar is {winner.label.upper()}.", winner.label)


def _colour_of(rng: random.Random, chart: Chart) -> Turn | None:
    bar = rng.choice(chart.bars)
    if not chart.has_colours and rng.random() < 0.7:
        question = say(
            rng,
            (
                "[What|Which] colo[u|]r are the [bars|columns]?",
                f"What is the colo[u|]r of the bars[| in this {_CHART}]?",
            ),
        )
        return _turn(question, f"The bars are {bar.colour}.", bar.colour)
    if bar.label is None:
        return None
    label = rng.choice(("{}", "the {} bar", "bar {}", "the bar [for|of|labeled] {}")).format(bar.label)
    question = say(
        rng,
        (
            "[What|Which] colo[u|]r is {bar}?",
            "What is the colo[u|]r of {bar}?",
            "[What|Which] colo[u|]r does {bar} have?",
        ),
        ("[what|which] colo[u|]r {bar} is",),
        bar=label,
    )
    return _turn(question, f"It is {bar.colour}.", bar.colour)

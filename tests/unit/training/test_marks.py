"""Marks: what lies where, as classes of the merged units, and the loss on them."""

import random

import torch

from training.charts import draw_chart
from training.marks import HEADS, IGNORED, UnitHeads, marks_loss, unit_targets
from training.sample import COLOURS, SHAPES, Mark
from training.scenes import several

_COLUMN = {name: index for index, name in enumerate(HEADS)}


def test_a_shape_is_in_the_unit_of_its_center_and_nothing_is_elsewhere() -> None:
    marks = [
        Mark(center=(0.9, 0.1), shape="circle", colour="red", alike=(2, 1, 1)),
        Mark(center=(0.95, 0.2), shape="star", colour="red", alike=(2, 1, 1)),
    ]
    targets = unit_targets(marks, 2, 4)
    assert targets[:, _COLUMN["things"]].tolist() == [0, 0, 0, 2, 0, 0, 0, 0]
    unit = targets[3]
    assert unit[_COLUMN["shape"]] == SHAPES.index("star")
    assert unit[_COLUMN["colour"]] == COLOURS.index("red")
    assert unit[_COLUMN["same_colour"]] == 2
    assert (targets[[0, 1, 2, 4, 5, 6, 7], 1:] == IGNORED).all()


def test_a_bar_says_its_value_and_the_beginning_of_its_name() -> None:
    targets = unit_targets([Mark(center=(0.1, 0.1), colour="blue", value=47, label="mon")], 1, 1)[0]
    assert [int(targets[_COLUMN[name]]) for name in ("things", "tens", "ones", "first", "second")] == [
        IGNORED,
        4,
        7,
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ".index("M"),
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ".index("O"),
    ]


def test_nothing_is_asked_of_a_picture_without_marks() -> None:
    assert (unit_targets(None, 3, 3) == IGNORED).all()


def test_drawn_things_and_bars_are_marked_where_their_colour_is() -> None:
    rng = random.Random(1)
    scene = several(rng, (224, 224), [("red", "circle"), ("red", "square"), ("blue", "circle")])
    assert [mark.alike for mark in scene.marks] == [(2, 2, 1), (2, 1, 1), (1, 2, 1)]
    chart = draw_chart(rng, (224, 224))
    assert len(chart.marks) >= len(chart.bars)
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in (mark.center for mark in chart.marks))


def test_the_loss_asks_only_for_what_is_marked_and_falls_with_right_answers() -> None:
    heads = UnitHeads(8)
    units = torch.zeros(1, 2, 8)
    targets = torch.full((1, 2, len(HEADS)), IGNORED)
    assert marks_loss(heads, units, targets).item() == 0
    targets[0, 1, _COLUMN["colour"]] = 3
    before = marks_loss(heads, units, targets).item()
    with torch.no_grad():
        heads.proj.bias[HEADS["things"] + HEADS["shape"] + 3] = 9.0
    assert marks_loss(heads, units, targets).item() < before

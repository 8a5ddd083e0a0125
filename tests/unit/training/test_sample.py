"""When an answer counts as right."""

import pytest

from training.sample import is_right


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The circle is red.", ("red",)),
        ("It is grey.", ("gray",)),
        ("It is an oval.", ("ellipse",)),
        ("There are two crosses.", ("2",)),
        ("There are 12 in all.", ("12",)),
        ("It is in the upper-left corner.", ("top left",)),
        ("In the middle.", ("center",)),
        ('It says "HELLO".', ("Hello",)),
        ("The tallest bar is B.", ("B",)),
        ("Yes, it is.", ("yes",)),
        ("The second picture.", ("second",)),
        ("I see nothing that I know in this picture.", ("nothing",)),
        ("I don't see a shape.", ("nothing",)),
        ("A red circle.", ("red", "circle")),
        ("Anything.", ()),
    ],
)
def test_right(answer: str, expected: tuple[str, ...]) -> None:
    assert is_right(answer, expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("It is red or blue.", ("red",)),
        ("It is at the top left.", ("top",)),
        ("It is at the top.", ("top left",)),
        ("There are 3, or 4.", ("3",)),
        ("It says HELLOS.", ("Hello",)),
        ("Yes and no.", ("yes",)),
        ("It is red.", ("nothing",)),
        ("A red square.", ("red", "circle")),
        ("The tallest bar is BC.", ("B",)),
    ],
)
def test_wrong(answer: str, expected: tuple[str, ...]) -> None:
    assert not is_right(answer, expected)

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.processing.tool_call_parser import ToolCallParser


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def read(*pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls of an output that comes in these pieces."""
    parser = ToolCallParser()
    readings = [*(parser.push(piece) for piece in pieces), parser.finish()]
    calls: list[tuple[str, str]] = []
    for reading in readings:
        for piece in reading.calls:
            if piece.name is not None:
                assert piece.index == len(calls)
                assert not piece.arguments
                calls.append((piece.name, ""))
            else:
                calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.arguments)
    return "".join(reading.text for reading in readings), calls


OUTPUTS = {
    "text": ("Just text.\n ", "Just text.\n ", []),
    "a call": (call("f", '{"x": 1}'), "", [("f", '{"x": 1}')]),
    "text and a call": ("Let me see.\n" + call("f", "{}"), "Let me see.", [("f", "{}")]),
    "two calls": (call("f", "{}") + "\n" + call("g", '{"a": [1, {"b": "}"}]}'), "", [
        ("f", "{}"), ("g", '{"a": [1, {"b": "}"}]}'),
    ]),
    "text behind a call": (call("f", "{}") + "\nDone.", "Done.", [("f", "{}")]),
    "strings with everything": (
        call("f", r'{"x": "\"}{</tool_call>\\", "y": "\\\""}'), "", [("f", r'{"x": "\"}{</tool_call>\\", "y": "\\\""}')]
    ),
    "loose white space": ('<tool_call>{ "name" : "f" ,\n"arguments":{"x":1} }</tool_call>', "", [("f", '{"x":1}')]),
    "arguments first": ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x":1}')]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "arguments as a string": ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
    "no call at all": ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    "a call in letters": ("I write <tool_call", "I write <tool_call", []),
    "cut in its head": ('<tool_call>\n{"name": "f", "argu', '<tool_call>\n{"name": "f", "argu', []),
    "cut in its arguments": ('<tool_call>\n{"name": "f", "arguments": {"x": "y', "", [("f", '{"x": "y')]),
    "cut behind them": ('<tool_call>\n{"name": "f", "arguments": {"x": 1}', "", [("f", '{"x": 1}')]),
    "cut in a second opening": (call("f", "{}") + "\n<", "", [("f", "{}")]),
    "cut late in a second opening": (call("f", "{}") + "\n<tool_call", "", [("f", "{}")]),
    "cut in a second head": (call("f", "{}") + '\n<tool_call>\n{"na', "", [("f", "{}")]),
    "cut in a second call's other order": (call("f", "{}") + '\n<tool_call>{"arguments": {"x', "", [("f", "{}")]),
    "a sign in the text behind a call": (call("f", "{}") + "\n1 <", "1 <", [("f", "{}")]),
    "a name of signs": (call('a"b', "{}"), "", [('a"b', "{}")]),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_reads_whole_and_letter_by_letter(name: str) -> None:
    output, text, calls = OUTPUTS[name]
    assert read(output) == (text, calls)
    assert read(*output) == (text, calls)


@given(st.data())
def test_pieces_do_not_matter(data: st.DataObject) -> None:
    output = data.draw(
        st.lists(st.sampled_from([*(output for output, _, _ in OUTPUTS.values()), *'{"\\< ']), max_size=4)
        .map("".join)
    )  # fmt: skip
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=6)))
    pieces = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    assert read(*pieces) == read(*output)


@given(st.text(), st.dictionaries(st.text(), st.lists(st.text()) | st.none(), max_size=4))
def test_any_text_and_any_arguments_come_through(text: str, arguments: dict[str, object]) -> None:
    encoded = json.dumps(arguments, ensure_ascii=False)
    read_text, calls = read(text + call("f", encoded))
    if "<tool_call>" not in text:
        assert read_text == text.rstrip()
        assert calls == [("f", encoded)]


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser()
    assert parser.push('<tool_call>\n{"name": "f", "arguments": {').calls[0].name == "f"
    assert parser.is_in_call
    assert [piece.arguments for piece in parser.push('"x": "one').calls] == ['"x": "one']
    assert [piece.arguments for piece in parser.push(' two"}}\n</tool_call>').calls] == [' two"}']
    assert not parser.is_in_call
    assert parser.num_calls == 1


@pytest.mark.parametrize(
    "piece",
    ["<tool_call>", "<", " ", '<tool_call>{"name": ', "{", '"', "\\", '<tool_call>{"name": "f", "arguments": {', "x"],
)
def test_little_is_looked_at_twice_whatever_is_repeated(piece: str) -> None:
    parser = ToolCallParser()
    parser.push('<tool_call>{"nam')
    for _ in range(5000):
        parser.push(piece)
        assert len(parser._pending) <= 1024

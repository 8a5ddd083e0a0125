"""Grammars that make an output JSON: any object, or what a JSON schema describes. Writes text; compiles nothing.

What a schema may say is JSON Schema (draft 2020-12) as llguidance knows it. References stay within the schema: nothing
is ever fetched.
"""

import json
from collections.abc import Mapping
from typing import Any

# White space as Python's json.dumps writes it, and no other: the form of the calls that the model family was trained
# on, and one in which a weak model cannot write white space for ever (docs/decisions.md).
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_object() -> str:
    """The grammar of any JSON object."""
    return json_answer(json_rule({"type": "object"}, is_strict=True))


def json_schema(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """The grammar of what `schema` describes; see `json_rule`."""
    return json_answer(json_rule(schema, is_strict=is_strict))


def json_answer(rule: str) -> str:
    """The grammar of an output that is what `rule`, of `json_rule`, describes."""
    return f"start: {rule}\n"


def json_rule(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """`schema` as the right side of a rule, in one line. With `is_strict` a keyword that cannot be enforced does not
    compile; without it, it is left to the model."""
    # `oneOf` is kept exactly where its branches exclude each other; else, leniently, as `anyOf`. The options are ours,
    # whatever the schema says: their key is llguidance's own and none of JSON Schema's.
    options = {**_ONE_LINE, "lenient": not is_strict, "coerce_one_of": not is_strict}
    return "%json " + json.dumps({**schema, "x-guidance": options})

"""Grammars that make an output JSON: any object, or what a JSON schema describes. Writes text; compiles nothing.

What a schema may say is JSON Schema (draft 2020-12) as llguidance knows it. References stay within the schema: nothing
is ever fetched.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

# Nothing, a space, or a line break and its indentation: models write both kinds of JSON, and a weak one that has begun
# with white space must not go on with it for ever.
_WHITESPACE = r"( |\n[ ]{0,40})"

# What Python's json.dumps writes, and with it the calls that the model family was trained on.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

Layout = Literal["free", "one line"]


def json_object() -> str:
    """The grammar of any JSON object."""
    return json_answer(json_rule({"type": "object"}, is_strict=True))


def json_schema(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """The grammar of what `schema` describes; see `json_rule`."""
    return json_answer(json_rule(schema, is_strict=is_strict))


def json_answer(rule: str) -> str:
    """The grammar of an output that is what `rule`, of `json_rule`, describes."""
    return f"start: {rule}\n"


def json_rule(schema: Mapping[str, Any], *, is_strict: bool, layout: Layout = "free") -> str:
    """`schema` as the right side of a rule. With `is_strict` a keyword that cannot be enforced does not compile;
    without it, it is left to the model.

    Args:
        layout: the white space between the parts.
    """
    options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE} if layout == "free" else dict(_ONE_LINE)
    # Ours, whatever the schema says: the key is llguidance's own and none of JSON Schema's.
    # `oneOf` is kept exactly where its branches exclude each other; else, leniently, as `anyOf`.
    return "%json " + json.dumps(
        {**schema, "x-guidance": {**options, "lenient": not is_strict, "coerce_one_of": not is_strict}}
    )

"""Renders messages through a checkpoint's chat template, keeping track of who wrote what. Knows no tokens.

Before rendering, every string of the request is replaced by a numbered mark; afterwards the marks show where a user's
text stands, and everything else was written by the template. So a user's text can neither forge a turn nor an image:
it never is part of the text in which special tokens are looked for. Whitespace around a text stays outside of its
mark, and empty text stays empty, so that `trim` and tests for emptiness do what the template means.

Limits of this: a template that tests or edits the inside of a text (`'x' in content`, `content | upper`,
`content.split('</think>')`, `content | length`) sees the mark. Tests find nothing; what cuts a mark in pieces is an
error. `tojson` is exact: it escapes the text behind the mark.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.checkpoint import CheckpointError, read_json

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# Strings of the protocol that templates compare with: field names, kinds, and the words of JSON Schema. None of them
# holds anything of a user's. All other strings, keys of objects included, are masked.
_PROTOCOL_WORDS = frozenset(
    """role content name type text image tool_calls tool_call_id id index function arguments refusal description
    parameters properties required items enum object string number integer boolean array null strict default anyOf
    allOf oneOf additionalProperties minimum maximum minLength maxLength minItems maxItems pattern format title const
    $defs $ref return""".split()  # noqa: SIM905
)

# A mark is OPEN, its number, one letter for each `tojson` it went through, CLOSE. The signs are printable, so that a
# template may print a whole object, and the template itself must not hold them.
_OPEN, _CLOSE = "\N{JAVANESE LEFT RERENGGAN}", "\N{JAVANESE RIGHT RERENGGAN}"
_MARK = re.compile(f"{_OPEN}([0-9]+)([ju]*){_CLOSE}")

# A message of a hundred megabytes is no message; it is a template that runs wild.
_MAX_RENDERED_CHARACTERS = 100_000_000


class ChatTemplateError(ValueError):
    """The template refuses these messages, or cannot be used with them; the message says why."""


class OwnText(str):
    """A text among the messages that this project wrote, not a user: special tokens in it are tokens, as in a
    template's. It never holds anything of a user's."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the rendered prompt: `template` text may hold special tokens, `user` text must be taken literally, and
    an `image` (without text) stands for the next image of the request."""

    kind: Literal["template", "user", "image"]
    text: str = ""


class ChatTemplate:
    """A checkpoint's chat template. Rendering is a pure read, so that one object may serve many threads."""

    def __init__(self, source: str, *, image_token: str, variables: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            source: the template in Jinja.
            image_token: the text that the template writes where an image's tokens go.
            variables: further names the template may use, such as `bos_token`.

        Raises:
            CheckpointError: the template does not parse, leaves the sandbox, or does not write one image token an
                image in a plain conversation.
        """
        if _OPEN in source or _CLOSE in source:
            raise CheckpointError(f"the chat template holds {_OPEN} or {_CLOSE}, which mark the users' texts here")
        self._image_token = image_token
        self._variables = dict(variables or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise CheckpointError(f"the chat template does not parse: {error}") from error
        # A template that is broken or hostile should stop the start, not the first request.
        try:
            self.render([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hello"}]}])
        except ChatTemplateError as error:
            raise CheckpointError(f"the chat template fails on a picture and a word from a user: {error}") from error

    @classmethod
    def from_checkpoint(cls, directory: Path, *, image_token: str) -> "ChatTemplate":
        """Reads `chat_template.jinja`, else `chat_template.json`, else `tokenizer_config.json`.

        Raises:
            CheckpointError: there is no template, or it is not usable (see `__init__`).
        """
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        return cls(_find_source(directory, config), image_token=image_token, variables=_special_tokens(config))

    @property
    def knows_tools(self) -> bool:
        """Whether the template looks at `tools`."""
        return self._knows_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Piece]:
        """Renders a conversation.

        Args:
            messages: `role`, and `content`: text, None, or a list of `{"type": "text", "text": ...}` and
                `{"type": "image"}`. Other fields (`name`, `tool_calls`, ...) go to the template.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: definitions in OpenAI's shape; a template that knows no tools ignores them.

        Raises:
            ChatTemplateError: a role is unknown, or the template refuses the messages, tears a text apart, or drops or
                adds images.
        """
        texts: list[str] = []
        try:
            masked = [_mask_message(message, texts) for message in messages]
            masked_tools = _mask(list(tools), texts) if tools else None
        except RecursionError:
            raise ChatTemplateError("the messages or tools are nested too deep") from None
        rendered = self._run(messages=masked, tools=masked_tools, add_generation_prompt=add_generation_prompt)
        pieces = _split(rendered, texts, self._image_token)
        num_images = sum(_count_images(message) for message in messages)
        num_markers = sum(piece.kind == "image" for piece in pieces)
        if num_markers != num_images:
            raise ChatTemplateError(f"the chat template wrote {num_markers} images; the messages hold {num_images}")
        return pieces

    def _run(self, **names: Any) -> str:
        parts: list[str] = []
        num_characters = 0
        try:
            for part in self._template.generate(**self._variables, **names):
                parts.append(part)
                num_characters += len(part)
                if num_characters > _MAX_RENDERED_CHARACTERS:
                    raise ChatTemplateError(f"the chat template wrote more than {_MAX_RENDERED_CHARACTERS} characters")
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program that came with the checkpoint: it may raise anything
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}"[:1000]) from error
        return "".join(parts)


def _find_source(directory: Path, tokenizer_config: Mapping[str, Any]) -> str:
    if (path := directory / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    source: Any = None
    if (path := directory / "chat_template.json").is_file():
        source = read_json(path).get("chat_template")
    if source is None:
        source = tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise CheckpointError(
            f"{directory} has no chat template: neither chat_template.jinja, nor chat_template.json, nor a "
            "chat_template in tokenizer_config.json"
        )
    return source


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"):
        value = tokenizer_config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _mask_message(message: Mapping[str, Any], texts: list[str]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise ChatTemplateError(f"role {role!r} is none of {', '.join(ROLES)}")
    masked = {key: _mask(value, texts) for key, value in message.items() if key not in ("role", "content")}
    content = message.get("content")
    if content is None:
        masked["content"] = ""
    elif isinstance(content, str):
        masked["content"] = _mask_text(content, texts)
    else:
        masked["content"] = [_mask_part(part, texts) for part in content]
    return {"role": role, **masked}


def _mask_part(part: Mapping[str, Any], texts: list[str]) -> dict[str, Any]:
    if part["type"] == "image":
        return {"type": "image"}
    assert part["type"] == "text", f"a part of type {part['type']!r} must not come this far"
    return {"type": "text", "text": _mask_text(part["text"], texts)}


def _mask(value: Any, texts: list[str]) -> Any:
    if isinstance(value, str):
        return value if value in _PROTOCOL_WORDS else _mask_text(value, texts)
    if isinstance(value, Mapping):
        return {_mask(key, texts): _mask(item, texts) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mask(item, texts) for item in value]
    assert value is None or isinstance(value, (bool, int, float)), type(value)
    return value


def _mask_text(text: str, texts: list[str]) -> str:
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    texts.append(OwnText(core) if isinstance(text, OwnText) else core)
    return f"{text[:start]}{_OPEN}{len(texts) - 1}{_CLOSE}{text[start + len(core) :]}"


def _split(rendered: str, texts: Sequence[str], image_token: str) -> list[Piece]:
    pieces: list[Piece] = []

    def add_template_text(text: str) -> None:
        if _OPEN in text or _CLOSE in text:
            raise ChatTemplateError("the chat template cuts the messages' texts, which is not served")
        for i, part in enumerate(text.split(image_token)):
            if i:
                pieces.append(Piece(kind="image"))
            if part:
                pieces.append(Piece(kind="template", text=part))

    end = 0
    for mark in _MARK.finditer(rendered):
        add_template_text(rendered[end : mark.start()])
        end = mark.end()
        if int(mark[1]) >= len(texts):
            raise ChatTemplateError("the chat template changes the messages' texts, which is not served")
        text = texts[int(mark[1])]
        kind: Literal["template", "user"] = "template" if isinstance(text, OwnText) else "user"
        for letter in mark[2]:
            text = json.dumps(text, ensure_ascii=letter == "u")[1:-1]
        pieces.append(Piece(kind=kind, text=text))
    add_template_text(rendered[end:])
    return pieces


def _count_images(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return 0
    return sum(part["type"] == "image" for part in content)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the name and the type are Jinja's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face templates expect it: their whitespace rules, tags, filters and functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML. A mark survives, and remembers that its text must be escaped too.
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        text = "".join(c if c.isascii() or c in (_OPEN, _CLOSE) else json.dumps(c)[1:-1] for c in text)
    return _MARK.sub(rf"{_OPEN}\1\2{'u' if ensure_ascii else 'j'}{_CLOSE}", text)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)

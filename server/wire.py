"""What all of the wire's models share: strictness, and errors that name their field. Knows pydantic, no fields."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class WireModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def rejected(message: str, *, at: str | None = None) -> PydanticCustomError:
    """An error whose message is a whole sentence. `at` is the path of the field within the object under validation."""
    # Braces would be read as fields of a template.
    context: dict[str, Any] = {"message": message}
    if at is not None:
        context["at"] = at
    return PydanticCustomError("rejected", "{message}", context)

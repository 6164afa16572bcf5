"""The bases of the types that cross a boundary."""

from typing import Any, Final, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator


class Frozen(BaseModel):
    """Immutable and closed: an unknown key is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


LARGEST: Final = 2**31 - 1


class Section(Frozen):
    """A part of the configuration, as a person types it.

    Kinds of value that no stage can use are refused in every field: each would end as an error of some library, hours
    later. Numbers are finite, whole ones fit a seed and a tensor's size, text is neither empty nor holds a NUL; and
    nothing is taken for another type: "2" and true are no numbers, 1 is not true.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, str_min_length=1, str_max_length=4096)

    @field_validator("*", mode="before")
    @classmethod
    def _lists_as_tuples(cls, value: Any, info: ValidationInfo) -> Any:
        """TOML and JSON have no tuples."""
        wanted = cls.model_fields[info.field_name or ""].annotation
        return tuple(value) if isinstance(value, list) and get_origin(wanted) is tuple else value

    @field_validator("*")
    @classmethod
    def _usable(cls, value: Any) -> Any:
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int) and item > LARGEST:
                raise ValueError(f"whole numbers go up to {LARGEST}")
            if isinstance(item, str) and "\0" in item:
                raise ValueError("text holds a NUL character")
        return value


def first_problem(error: ValidationError) -> str:
    """The first of the problems that pydantic found, in one line: where it is, and what it is."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    return (f"{key}: " if key else "") + first["msg"].removeprefix("Value error, ")

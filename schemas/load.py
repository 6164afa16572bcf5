"""TOML files to configurations, with one clear line for each key that is wrong."""

import difflib
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from schemas.config import RunConfig
from schemas.errors import UserError

Location = tuple[int | str, ...]
SHOWN_CHARS: Final = 200


class ConfigError(UserError):
    """A configuration that cannot be used; `problems` holds one line for each wrong key."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


def _parsed(toml: str) -> dict[str, Any]:
    """The table that a text in TOML stands for; ValueError, of whatever kind, with the reason when it is none."""
    try:
        return tomllib.loads(toml)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _shown(value: Any) -> str:
    """A value as it is repeated to whoever typed it, on a line that can still be read."""
    try:
        text = repr(value)
    except RecursionError:
        return "a value that is nested too deeply"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _dotted(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _model_at(location: Location, root: type[BaseModel]) -> type[BaseModel] | None:
    """The model class whose fields stand at `location`; None when there is no such model."""
    model = root
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return None
        model = field.annotation
    return model


def _allowed(annotation: Any) -> str:
    """What a value of this type looks like, in TOML's words."""
    names = {str: "text", bool: "true or false", int: "a whole number", float: "a number", type(None): ""}
    if annotation in names:
        return names[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(filter(None, map(_allowed, arguments)))
    if origin is tuple:
        return f"a list of {_allowed(arguments[0])}"
    if origin is dict:
        return "a table"
    if origin is not None:  # Literal
        return "one of " + ", ".join(map(str, arguments))
    return "a table"


def _other_bound(crossed: Mapping[str, Any], field: FieldInfo) -> str:
    """What a number that crossed one bound has to keep to as well: pydantic names just the crossed one."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [(word, getattr(item, name, None)) for item in field.metadata for name, word in words.items()]
    return "".join(f" and {word} {bound:g}" for word, bound in bounds if bound not in (None, *crossed.values()))


def _closest(wrong: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]}?" if match else ""


def _section_of(key: str, root: type[BaseModel]) -> str:
    """The section that does have this key, for a key that was put into the wrong one."""
    for name, field in root.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            if key in field.annotation.model_fields:
                return f"; did you mean {name}.{key}?"
            if inner := _section_of(key, field.annotation):
                return inner.replace("mean ", f"mean {name}.")
    return ""


def _problem(error: Mapping[str, Any], root: type[BaseModel]) -> str:
    location: Location = tuple(error["loc"])
    owner = _model_at(location[:-1], root)
    key = _dotted(location)
    match error["type"]:
        case "extra_forbidden":
            known = sorted(owner.model_fields) if owner else []
            hint = _closest(str(location[-1]), known) or _section_of(str(location[-1]), root)
            return f"{key}: unknown key{hint or '; known here: ' + ', '.join(known)}"
        case "missing":
            field = owner.model_fields.get(str(location[-1])) if owner else None
            meaning = f" ({field.description})" if field and field.description else ""
            return f"{key}: required, and not given{meaning}"
        case "literal_error":
            choices = str(error["ctx"]["expected"])
            hint = _closest(str(error["input"]), re.findall(r"'([^']*)'", choices))
            return f"{key}: {_shown(error['input'])} is not one of {choices}{hint}"
        case "value_error":
            return f"{key or 'configuration'}: {error['ctx']['error']}"
        case _:
            field = owner.model_fields.get(str(location[-1])) if owner else None
            expected = ""
            if field and "_type" in error["type"]:
                expected = f"; expected {_allowed(field.annotation)}"
            elif field and error["type"].startswith(("greater_than", "less_than")):
                expected = _other_bound(error["ctx"], field)
            return f"{key}: {error['msg'].lower()}{expected}, got {_shown(error['input'])}"


def _line_of(location: Location, text: str) -> int | None:
    """The line on which a key of the file stands; None when it is not written there as a plain key."""
    names = [part for part in location if isinstance(part, str)]
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = header[1].replace(" ", "")
            if section == ".".join(names):
                return number
        elif (key := re.match(r"\s*([\w.\-]+)\s*=", line)) and ".".join(filter(None, (section, key[1]))) == ".".join(
            names
        ):
            return number
    return None


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """`sft.epochs=3` to (("sft", "epochs"), 3). The value is TOML; a bare word is text.

    Raises:
        UserError: no `=`, an empty key, or a value that TOML cannot read.
    """
    key, equals, value = text.partition("=")
    names = tuple(key.strip().split("."))
    if not equals or not all(names):
        raise UserError("cannot be read", where=f"--set {text}", fix="write KEY=VALUE, e.g. --set sft.epochs=2")
    try:
        return names, _parsed(f"value = {value}")["value"]
    except ValueError as error:
        if re.fullmatch(r"[\w./:*~-]+", value.strip()):
            return names, value.strip()
        raise UserError(
            f"the value is not TOML: {error}", where=f"--set {text}", fix="e.g. 'source.paths=[\"runs\"]'"
        ) from error


def _put(data: dict[str, Any], names: tuple[str, ...], value: Any, shown: str) -> None:
    for name in names[:-1]:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise UserError(f"{name} is a value, not a section", where=f"--set {shown}")
    data[names[-1]] = value


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run's configuration and applies `key=value` overrides on top.

    Raises:
        UserError: the file is missing or is no TOML, or an override cannot be read.
        ConfigError: unknown, missing or mistyped keys; one line each.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError("not a file", where=path, fix="give a TOML file")
        text = path.read_text(encoding="utf-8-sig")  # some editors of Windows begin a file with a byte-order mark
        data = _parsed(text)
    except FileNotFoundError as error:
        found = (file for pattern in ("*.toml", "configs/*.toml") for file in path.parent.glob(pattern))
        known = sorted(str(file) for file in found if file.name != "pyproject.toml")
        fix = f"there is: {', '.join(known)}" if known else f"there is none in {path.parent}"
        raise UserError("no such configuration file", where=path, fix=fix) from error
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path, fix="give a TOML file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot be read: {error}", where=path, fix="give a TOML file") from error
    except ValueError as error:
        raise UserError(f"not a TOML file: {error}", where=path) from error
    overridden = set()
    for override in overrides:
        names, value = parse_override(override)
        _put(data, names, value, override)
        overridden.add(".".join(names))
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        problems = []
        details = error.errors()
        places = {detail["loc"][:-1] for detail in details}
        for detail in details:
            location = tuple(detail["loc"])
            if detail["type"] == "too_short" and location in places:
                continue  # a list that is told to be too short because its items are wrong, which is told as well
            key = _dotted(location)
            if any(key.startswith(name) or name.startswith(f"{key}.") for name in overridden):
                where = "--set"
            else:
                line = _line_of(location, text)
                where = f"{path}:{line}" if line else str(path)
            problems.append(f"{where}: {_problem(detail, RunConfig)}")
        raise ConfigError(problems) from error

"""Base of settings classes: frozen pydantic models that refuse a wrong value in one sentence."""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic.fields import FieldInfo

from napari_beerlanet.core.common.messages import quoted

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Option:
    """How a command line has a setting, where its name and type do not say it.

    `flag` is its spelling; of a setting that is on by default, that of the switch which turns it
    off. `value` is what the help calls its value, `group` the heading that it stands under.
    A setting that is `in_files_only` has no option.
    """

    flag: str = ""
    value: str = ""
    group: str = ""
    in_files_only: bool = False


@dataclass(frozen=True)
class FieldSpec:
    """One setting as forms and command lines need it.

    `types` are the plain types that it may have, None not among them; `choices` the words of a
    `Literal`, such as "auto". A bound is None where there is none; `above` is one that is excluded.
    """

    name: str
    default: Any
    types: tuple[type, ...]
    choices: tuple[Any, ...]
    optional: bool
    minimum: float | None
    above: float | None
    maximum: float | None
    description: str
    option: Option

    @property
    def flag(self) -> str:
        """The option: --name; of what is on by default, --no-name."""
        start = "--no-" if self.default is True else "--"
        return self.option.flag or start + self.name.replace("_", "-")

    def words(self, value: Any) -> list[str]:
        """The option with a value, as on a command line."""
        if isinstance(value, bool):
            return [self.flag]
        if isinstance(value, tuple) and not isinstance(self.default, tuple):
            value = ",".join(map(str, value))
        texts = [str(one) for one in (value if isinstance(value, tuple) else (value,))]
        if any(text.startswith("-") for text in texts):  # which would be taken for options
            return [f"{self.flag}={text}" for text in texts]
        return [self.flag, *texts]

    def allowed(self) -> str:
        """What the value may be, in a few words."""
        if self.minimum is not None and self.maximum is not None:
            limits = [f"from {self.minimum:g} to {self.maximum:g}"]
        else:
            limits = [
                *([f"of at least {self.minimum:g}"] if self.minimum is not None else []),
                *([f"above {self.above:g}"] if self.above is not None else []),
                *([f"at most {self.maximum:g}"] if self.maximum is not None else []),
            ]
        kinds = [_KINDS.get(kind, f"a {kind.__name__}") for kind in self.types]
        if limits and kinds:
            kinds[0] += " " + " and ".join(limits)
        words = ", ".join(f'"{choice}"' for choice in self.choices)
        if words and not kinds:
            return f"one of {words}"
        return " or ".join([*kinds, *([words] if words else [])])


class Settings(BaseModel):
    """Settings declared once: their defaults, bounds and descriptions serve API, CLI and forms.

    Values are checked when they are given; a wrong one is a `ValueError` of one sentence.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    option_group: ClassVar[str] = ""
    """The heading that the options of its settings stand under."""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError(_message(type(self), error)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _from_numpy(cls, value: Any) -> Any:
        """NumPy's numbers are numbers, too."""
        return value.item() if getattr(value, "shape", None) == () else value

    def replace(self, **changes: Any) -> Self:
        """The same settings but for some, checked again."""
        return type(self)(**{**dict(self), **changes})

    @classmethod
    def default(cls, name: str) -> Any:
        """The default of a setting."""
        return cls.model_fields[name].get_default(call_default_factory=True)

    @classmethod
    def spec(cls, name: str) -> FieldSpec:
        """Type, bounds, default and description of a setting."""
        field = cls.model_fields[name]
        plain: list[Any] = []
        metadata: list[Any] = list(field.metadata)
        _collect(field.annotation, plain, metadata)
        return FieldSpec(
            name,
            field.get_default(call_default_factory=True),
            tuple(kind for kind in plain if isinstance(kind, type) and kind is not type(None)),
            tuple(value for kind in plain for value in _literals(kind)),
            type(None) in plain,
            _bound(metadata, "ge"),
            _bound(metadata, "gt"),
            _bound(metadata, "le"),
            field.description or "",
            cls._option(name, next((one for one in metadata if isinstance(one, Option)), Option())),
        )

    @classmethod
    def _option(cls, name: str, option: Option) -> Option:
        """An option under its heading, which is that of the class that declares the setting."""
        declaring = [c for c in cls.__mro__ if issubclass(c, Settings) and name in c.model_fields]
        return replace(option, group=option.group or declaring[-1].option_group)


def _collect(annotation: Any, plain: list[Any], metadata: list[Any]) -> None:
    """The members of a union, and the constraints of those that are annotated."""
    if get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            _collect(member, plain, metadata)
    elif get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        for note in notes:
            metadata += note.metadata if isinstance(note, FieldInfo) else [note]
        _collect(inner, plain, metadata)
    elif get_origin(annotation) is Literal:
        plain.append(annotation)
    elif get_origin(annotation) is tuple and get_origin(get_args(annotation)[0]) is Literal:
        plain.append(get_args(annotation)[0])  # some of these words
    else:
        plain.append(get_origin(annotation) or annotation)


def _literals(kind: Any) -> Iterable[Any]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _bound(metadata: list[Any], name: str) -> float | None:
    return next((value for m in metadata if (value := getattr(m, name, None)) is not None), None)


def _message(cls: type[Settings], error: ValidationError) -> str:
    """The first thing that is wrong, as a sentence."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return f"There is no setting {quoted(name)}; there are {', '.join(cls.model_fields)}."
    if first["type"] == "missing":
        return f"The setting {quoted(name)} is missing."
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    return f"{name} must be {cls.spec(name).allowed()}, not {quoted(first['input'])}."

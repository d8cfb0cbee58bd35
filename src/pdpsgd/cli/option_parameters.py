"""Commands whose options are the fields of options classes.

A command's parameter that is annotated with a subclass of `Options` becomes one option for each of its fields, with
the field's help, panel and default. The command is called with the options themselves, which know of each value
whether it was typed, came from `--config`, or was left to presets and defaults.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from pdpsgd.cli import shared
from pdpsgd.errors import fail
from pdpsgd.training.options import Option, Options


@dataclass(frozen=True)
class Only:
    """A mark on a parameter: of its options class, the command has these options alone."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of the options classes among its parameters."""
    hints = get_type_hints(function, include_extras=True)
    classes: dict[str, tuple[type[Options], tuple[str, ...]]] = {}
    plain: list[str] = []
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        found = _options_class(hint)
        if found is None:
            plain.append(parameter.name)
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            classes[parameter.name] = found
            parameters += _parameters(*found)

    def command(ctx: typer.Context, **values: Any) -> None:
        made = {name: _collect(ctx, values, *found) for name, found in classes.items()}
        function(**made, **{name: values[name] for name in plain})

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_ONLY, annotation=typer.Context)
    signature = inspect.Signature([context, *parameters])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def _options_class(hint: Any) -> tuple[type[Options], tuple[str, ...]] | None:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    kind = get_args(hint)[0] if marks else hint
    if not (isinstance(kind, type) and issubclass(kind, Options)):
        return None
    offered = [name for name, known in kind.declared().items() if known.kind is not None]
    only = next((mark.names for mark in marks if isinstance(mark, Only)), tuple(offered))
    return kind, only


def _parameters(kind: type[Options], names: tuple[str, ...]) -> Iterator[inspect.Parameter]:
    for name in names:
        known = kind.declared()[name]
        spellings = known.names or ("--" + name.replace("_", "-"),)
        made = shared.option(
            *spellings, help=known.help, panel=known.panel, show_default=known.shown, min=known.least
        )
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(known),
            annotation=Annotated[known.kind if _default(known) is not None else known.kind | None, made],
        )


def _default(known: Option) -> Any:
    return known.default or None if known.kind == list[str] else known.default


def _collect(ctx: Any, values: dict[str, Any], kind: type[Options], names: tuple[str, ...]) -> Options:
    said: dict[str, Any] = {}
    from_file = []
    for name in names:
        source = ctx.get_parameter_source(name)
        if source is None or source.name in ("DEFAULT", "PROMPT"):
            continue
        said[name] = READ[name](values[name]) if name in READ else values[name]
        if source.name == "DEFAULT_MAP":
            from_file.append(name)
    return kind(**said, from_file=from_file)


def _read_optimizer_options(texts: list[str] | None) -> dict[str, Any]:
    """Read `nesterov=true` as {"nesterov": True}."""
    parsed = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals:
            fail(f"Expected --optimizer-option as name=value, for example nesterov=true. Got {text!r}.")
        try:
            parsed[name] = json.loads(value)
        except json.JSONDecodeError:
            parsed[name] = value
    return parsed


def _read_augment(text: str | None) -> Any:
    if not text or ":" not in text:
        return text
    from pdpsgd.models.networks import find_function

    return find_function(text, what="augment", example="my_views:shift")


READ: dict[str, Callable[[Any], Any]] = {
    "augment": _read_augment,
    "optimizer_options": _read_optimizer_options,
    "weights": shared.parse_weights,
}
"""Options whose text on the command line stands for another value."""

"""Groups of options as structs: each field of the struct is an option of the command."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_origin, get_type_hints

import msgspec


def option_name(option: str) -> str:
    """Return what an option is called on the command line: ``--max-idle`` of ``max_idle``."""
    return f"--{option.replace('_', '-')}"


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with options in place of each argument that is a struct.

    Fields that are annotated with a typer option become options; the others keep their defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    structs = {
        name: _parameters_of_struct(kind)
        for name, kind in hints.items()
        if isinstance(kind, msgspec.StructMeta)
    }

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, options in structs.items():
            told = {option.name: given.pop(option.name) for option in options}
            given[name] = hints[name](**told)
        command(**given)

    flat = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for argument in inspect.signature(command).parameters.values()
        for each in structs.get(argument.name, [argument])
    ]
    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in flat}
    return run


def _parameters_of_struct(struct: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(struct, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default_factory()
            if field.default is msgspec.NODEFAULT
            else field.default,
            annotation=hints[field.name],
        )
        for field in msgspec.structs.fields(struct)
        if get_origin(hints[field.name]) is Annotated
    ]

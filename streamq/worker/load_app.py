"""Finding a user's code by its name: ``package.module:app`` or ``file.py:app``."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import msgspec

from streamq.app import App, Handler, describe_handler, handler_takes_table
from streamq.errors import StreamqError
from streamq.flows.file import read_flow_file
from streamq.flows.flow import Flow


class TargetError(StreamqError):
    """The module or the name in it is not there, or is nothing that can be run."""


def load_flow(target: str) -> Flow:
    """Return the flow that a target names: ``module:flow``, ``file.py:flow`` or ``flow.toml``.

    Raises:
        TargetError: there is no such module or name, or it is no flow.
        InvalidValue: the file describes no flow.
    """
    if target.endswith(".toml"):
        return read_flow_file(Path(target))
    found = _find_target(target, "flow")[1]
    if not isinstance(found, Flow):
        raise TargetError(f"{target} is a {type(found).__name__}, not a streamq.Flow")
    return found


def load_flow_app(target: str, serves: Mapping[str, str] = MappingProxyType({})) -> App:
    """Return an app of the handlers of a flow, found in the app or the module that has the flow.

    ``serves`` names handlers otherwise: by the name that is served, that of the flow's handler.

    Raises:
        TargetError: there is no such flow, or nothing is there that one of its handlers names.
        InvalidValue: there can be no such flow.
    """
    flow = load_flow(target)
    wanted = [stage.handler for stage in flow.stages] if flow.shape else []
    handlers: dict[str, Handler] = {}
    for app in _apps_with(target, flow):
        handlers = app.handlers | handlers
    if missing := [name for name in wanted if name not in handlers]:
        known = ", ".join(handlers) or "none"
        raise TargetError(
            f"flow {flow.name} names a handler {missing[0]!r} that is not there; there is {known}"
        )
    app = App()
    for name, own in (serves or dict(zip(wanted, wanted, strict=True))).items():
        app.handlers[name] = msgspec.structs.replace(handlers[own], name=name)
    return app


def _apps_with(target: str, flow: Flow) -> list[App]:
    """Return the apps whose handlers a flow may name: its own, and those of its module."""
    if target.endswith(".toml"):
        if not flow.app:
            raise TargetError(
                f'{target} does not say which app has its handlers: write app = "module:app" there'
            )
        return [load_app(flow.app)]
    module = _find_target(target, "flow")[0]
    apps = [value for value in vars(module).values() if isinstance(value, App)]
    owner = flow.owner
    return [owner, *apps] if isinstance(owner, App) else apps


def _find_target(target: str, what: str) -> tuple[ModuleType, Any]:
    """Return the module of a target, and what the target names in it."""
    module_name, colon, name = target.rpartition(":")
    if not colon or not module_name or not name:
        ways = f"package.module:{what} or file.py:{what}"
        if target.endswith(".py"):
            ways = f"{target}:{what}"
        raise TargetError(f"{target!r} names no {what}: write {ways}")
    module = _load_module(module_name)
    found: Any = module
    for attribute in name.split("."):
        if not hasattr(found, attribute):
            more = _apps_of(found) or _other_file(module_name, module, name)
            raise TargetError(f"{module_name} has no {name!r}{more}")
        found = getattr(found, attribute)
    return module, found


def load_app(target: str, handler: str = "") -> App:
    """Return the app that a target names. With a handler's name the target is a function.

    Errors that the user's module raises pass through.

    Raises:
        TargetError: there is no such module or name, or it is no app.
    """
    module, found = _find_target(target, "function" if handler else "app")
    name = target.rpartition(":")[2]
    if handler and callable(found):
        return _app_of(module, found, handler)
    if handler and isinstance(found, App):
        functions = [each.function.__name__ for each in found.handlers.values()]
        own = [f"{target.rpartition(':')[0]}:{each}" for each in functions if hasattr(module, each)]
        there = f": {' or '.join(own)}" if own else ""
        raise TargetError(f"{target} is an app, not a function: name one of its functions{there}")
    if handler:
        raise TargetError(f"{target} is a {type(found).__name__}, not a function")
    if not isinstance(found, App):
        raise TargetError(f"{target} is a {type(found).__name__}, not a streamq.App")
    if not found.handlers:
        raise TargetError(f"{target} has no handlers: decorate one with @{name}.map")
    return found


def _app_of(module: ModuleType, function: Any, name: str) -> App:
    """Return an app of one function: as it was decorated, or else called with each record.

    A function that takes a table is called with each part.
    """
    apps = [value for value in vars(module).values() if isinstance(value, App)]
    decorated = [h for app in apps for h in app.handlers.values() if h.function is function]
    is_map = not handler_takes_table(function)
    handler = decorated[0] if decorated else describe_handler(function, is_map=is_map, name=name)
    app = App()
    app.handlers[name] = msgspec.structs.replace(handler, name=name)
    return app


def files_of_user_code() -> list[str]:
    """Return the files of the modules that were loaded from below the current folder."""
    here = Path.cwd()
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return sorted(f for f in files if f and Path(f).is_relative_to(here) and ".venv" not in f)


def _load_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if name.endswith(".py"):
        return _load_app_file(Path(name))
    if name.startswith("."):
        raise TargetError(f"there is no module {name!r}; a file is named as folder/file.py:NAME")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If the user's module was found, and a module that it imports was not, the user needs the
        # traceback.
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        raise TargetError(f"there is no module {name!r} here or on the path") from None


def _load_app_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # A module of Python with the same name stays what it is for all others.
    known = sys.modules.get(path.stem)
    is_free = known is None or getattr(known, "__file__", "") == str(path.absolute())
    name = path.stem if is_free else f"{path.stem}_py"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _other_file(name: str, module: ModuleType, wanted: str) -> str:
    """Return in words that a file of the current folder is not what its name means; "" if it is."""
    path = Path(f"{name}.py")
    if not path.is_file() or str(path.absolute()) == getattr(module, "__file__", ""):
        return ""
    return f": {name} is a module of Python; write {path}:{wanted}"


def _apps_of(module: Any) -> str:
    if isinstance(module, App):
        names = ", ".join(map(repr, module.handlers)) or "no handlers"
        return f"; the app has {names}: name a function of the module instead"
    apps = [name for name, value in vars(module).items() if isinstance(value, App)]
    return f"; it has the app {apps[0]!r}" if apps else ""

"""The module ``__main__`` of a worker, which holds the classes and functions of the driver's script.

A worker never executes the script. :func:`pack` pickles the train function by value, together with all classes and
functions of the script. :func:`unpack` binds them in a new module ``__main__``, whose dict is the globals of all these
functions. So ``__main__.Net is Net`` holds in a worker, and everything that pickles a class or function by its name
works: ``torch.save``, loader processes, pools and collectives of objects.

The parts of a packed function, in the order in which a worker loads them:

1. The train function and its config, with everything that they refer to. If this part cannot be pickled, ``fit()``
   raises an error.
2. The other definitions of the script that need only packages which part 1 needs too, and the constants that they use.
3. The definitions that need further packages. They are loaded when one of them is first looked up in ``__main__``, so
   that a worker does not import what only the driver uses.

A definition of part 2 or 3 that cannot be pickled or loaded is missing in the worker, and using it names the reason.

A class or function of the script is sent with a token. An object that returns to the driver contains only the tokens,
so the driver gets its own classes: ``except MyError`` catches the error that a worker raised.
"""

from __future__ import annotations

import dis
import functools
import io
import logging
import pickle
import re
import sys
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from drivetrain._base.pickling import Pickler
from drivetrain._base.processstate import ProcessState

__all__ = ["dumps_to_driver", "dumps_to_worker", "explain_absent", "forget_script", "pack", "unpack"]

ABSENT_NOTE = "[DT-121] workers do not have {name!r} of the script: {reason}"

_MAIN = "__main__"
_DYNAMIC = frozenset({"globals", "eval", "exec", "vars", "get_type_hints"})
_ATTRIBUTES = ("__file__", "__package__", "__doc__")
_MAX_ITEMS = 10_000
_MAX_TEXT = 1_000_000
_NOT_USED = "the train function does not use it, and it is not a class, a function or a plain constant"

_Reduce = Callable[[Any], Any] | None
_Cached = type(functools.lru_cache(lambda: None))
_BY_NAME = (type, FunctionType, BuiltinFunctionType, ModuleType, logging.Logger, re.Pattern, PurePath, Enum)

_tokens: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_objects: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""The classes and functions of the script in this process. The same object has the same token in all processes."""


class ScriptModule(ModuleType):
    """A worker's ``__main__``."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            _load_rest()
            if name in vars(self):
                return vars(self)[name]
        note = ABSENT_NOTE.format(name=name, reason=_absent[name]) if name in _absent else ""
        raise AttributeError(f"module {_MAIN!r} has no attribute {name!r}. {note}".rstrip(". "), name=name, obj=self)


_module: ScriptModule | None = None
_absent: dict[str, str] = {}
_rest: Callable[[], None] | None = None


def forget_script() -> None:
    """Make the next object of a script that is unpickled bind to a new module ``__main__``."""
    global _module, _rest
    _module = _rest = None
    _absent.clear()
    _tokens.clear()
    _objects.clear()


def _namespace() -> dict[str, Any]:
    """Return the dict of the worker's ``__main__``. The first call creates the module."""
    global _module
    if _module is None:
        # The second name is the one that multiprocessing gives the module in spawned processes and their pickles.
        sys.modules[_MAIN] = sys.modules["__mp_main__"] = _module = ScriptModule(_MAIN)
    return vars(_module)


def _load_rest() -> None:
    global _rest
    rest, _rest = _rest, None
    if rest is not None:
        rest()


def explain_absent(error: BaseException) -> None:
    """If a name of the script is missing in this worker, add the reason to the message of the error."""
    name = getattr(error, "name", None)
    if isinstance(error, NameError) and name in _absent and error.args and "[DT-121]" not in str(error):
        error.args = (f"{error.args[0]}. {ABSENT_NOTE.format(name=name, reason=_absent[name])}", *error.args[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A packed train function.

    Attributes:
        state: the settings of the driver's process.
        attributes: attributes of the module ``__main__``; None if the worker keeps its own module.
        body: the pickle of part 1.
        eager: the pickles of part 2 by name. Each contains the definitions before it by their tokens only.
        lazy: the pickles of part 3 by name.
        absent: definitions that are not sent, with the reason.
    """

    state: ProcessState
    attributes: Mapping[str, Any] | None
    body: bytes
    eager: Mapping[str, bytes]
    lazy: Mapping[str, bytes]
    absent: Mapping[str, str]


def pack(value: tuple[Callable[..., Any], Any], reduce: _Reduce = None) -> bytes:
    """Pickle a train function and its config for workers, together with the definitions of the script.

    Args:
        value: the train function and its config.
        reduce: see :func:`drivetrain._base.pickling.dumps`.
    """
    script = _script_of(value[0])
    data = io.BytesIO()
    pickler = _ToWorker(data, reduce)
    pickler.dump(value)
    needed = {*pickler.packages, *sys.stdlib_module_names, _MAIN}
    eager, lazy, absent = _further_definitions(script, pickler.used, needed, reduce)
    if pickler.is_dynamic:
        eager, lazy = [*eager, *lazy], []
    sent = set(pickler.tokens)

    def pickle_each(names: Iterable[str]) -> dict[str, bytes]:
        pickles: dict[str, bytes] = {}
        for name in names:
            try:
                pickles[name] = _pickle_definition(script[name], sent, reduce)
            except Exception as error:  # a user's object may raise any exception
                absent[name] = f"{type(error).__name__}: {error}"
        return pickles

    packed = Packed(
        state=ProcessState.of_this_process(dumps_to_worker),
        attributes=_attributes(script) if pickler.tokens or eager or lazy else None,
        body=data.getvalue(),
        eager=pickle_each(eager),
        lazy=pickle_each(lazy),
        absent=absent,
    )
    return pickle.dumps(packed)


def _pickle_definition(value: Any, sent: set[str], reduce: _Reduce) -> bytes:
    """Pickle a global of the script. Objects that were sent before are replaced by their tokens."""
    data = io.BytesIO()
    pickler = _Definition(data, reduce, sent)
    pickler.dump(value)
    sent |= pickler.tokens
    return data.getvalue()


def _attributes(script: Mapping[str, Any]) -> dict[str, Any]:
    attributes = {name: script[name] for name in _ATTRIBUTES if name in script}
    spec = script.get("__spec__")
    if isinstance(spec, ModuleSpec):  # of `python -m`: processes that a worker spawns import the module by its name
        attributes["__spec__"] = ModuleSpec(spec.name, None, origin=spec.origin)
    return attributes


def unpack(data: bytes) -> Any:
    """Return the train function and its config, and bind the definitions of the script in ``__main__``.

    The process gets the settings of the driver's process first.

    Raises:
        Exception: the train function or its config cannot be unpickled in this process.
    """
    global _rest
    packed: Packed = pickle.loads(data)
    packed.state.apply()
    if packed.attributes is not None:
        _namespace().update(packed.attributes)
    _absent.update(packed.absent)
    value = pickle.loads(packed.body)
    _bind_all(packed.eager)
    if packed.lazy:
        _absent.update(dict.fromkeys(packed.lazy, "it needs a package that the train function does not import"))
        _rest = functools.partial(_bind_all, packed.lazy)
    packed.state.apply_after_imports(pickle.loads)
    return value


def _bind_all(definitions: Mapping[str, bytes]) -> None:
    for name, data in definitions.items():
        try:
            _namespace()[name] = pickle.loads(data)
            _absent.pop(name, None)
        except Exception as error:  # for example, a package is not installed on this node
            _absent[name] = f"{type(error).__name__}: {error}"


def dumps_to_worker(value: Any, reduce: _Reduce = None) -> bytes:
    """Pickle a value for a worker. Functions of the script use the globals of the worker's ``__main__``."""
    data = io.BytesIO()
    _ToWorker(data, reduce).dump(value)
    return data.getvalue()


def dumps_to_driver(value: Any) -> bytes:
    """Pickle a value of a worker for the driver, which gets its own classes and functions of the script."""
    data = io.BytesIO()
    _ToDriver(data, None).dump(value)
    return data.getvalue()


class _Globals(dict[str, Any]):
    """Stands for the globals of the script in a pickle."""


class _ToWorker(Pickler):
    """Pickles classes and functions of the script by value.

    Attributes:
        used: the globals of the script that the pickled functions refer to.
        packages: the packages that are imported when the pickles are loaded.
        tokens: the tokens of the pickled classes and functions of the script.
        is_dynamic: True if a pickled function of the script may look up names at run time.
    """

    def __init__(self, file: Any, reduce: _Reduce) -> None:
        super().__init__(file, reduce)
        self.used: dict[str, Any] = {}
        self.packages: set[str] = set()
        self.tokens: set[str] = set()
        self.is_dynamic = False

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _Globals):
            return _namespace, ()
        if isinstance(obj, _Cached):  # functools pickles it by name
            return _cached, (obj.__wrapped__, *obj.cache_parameters().values())
        if isinstance(obj, FunctionType) and _is_of_script(obj):
            self.globals_ref[id(obj.__globals__)] = _Globals(script=True)
        reduced = super().reducer_override(obj)
        if isinstance(obj, (type, FunctionType, BuiltinFunctionType, ModuleType)):
            if not _is_of_script(obj):
                self.packages.add(_package_of(obj))
            elif isinstance(reduced, tuple) and len(reduced) == 6:
                return self._with_token(obj, reduced)
        return reduced

    def _with_token(self, obj: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        make, arguments, state, *rest = reduced
        if isinstance(obj, FunctionType):
            self.is_dynamic = self.is_dynamic or not _DYNAMIC.isdisjoint(obj.__code__.co_names)
            self.used.update(state[1]["__globals__"])
        try:
            token = _tokens.setdefault(obj, uuid.uuid4().hex)
            _objects[token] = obj
        except TypeError:  # a metaclass made the class unhashable
            return reduced
        self.tokens.add(token)
        return _bind, (token, make, *arguments), state, *rest


class _Definition(_ToWorker):
    """Pickles a global of the script without the globals to which it refers, which are sent separately."""

    def __init__(self, file: Any, reduce: _Reduce, sent: set[str]) -> None:
        super().__init__(file, reduce)
        self._sent = sent

    def _with_token(self, obj: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        if _token_of(obj) in self._sent:
            return _known, (_token_of(obj),)
        if isinstance(obj, FunctionType):
            make, arguments, (attributes, slots), *rest = reduced
            reduced = make, arguments, (attributes, {**slots, "__globals__": {}}), *rest
        return super()._with_token(obj, reduced)


class _Inspector(_ToWorker):
    """Finds the needs of one definition of a script. Other definitions are only named.

    Attributes:
        definitions: the names of the definitions, by the id of the object.
        inspected: the definition.
        parts: the names of the definitions that have to be loaded first, such as base classes.
        names: the globals to which the functions refer.
    """

    def __init__(self, definitions: Mapping[int, str], inspected: Any, reduce: _Reduce) -> None:
        super().__init__(io.BytesIO(), reduce)
        self.definitions = definitions
        self.inspected = inspected
        self.parts: set[str] = set()
        self.names: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if obj is not self.inspected and (name := self.definitions.get(id(obj))) is not None:
            self.parts.add(name)
            return str, (name,)
        if isinstance(obj, FunctionType) and _is_of_script(obj):  # pickling it in full would take ten times as long
            self.names.update(_global_names(obj.__code__))
            return str, (), (obj.__defaults__, obj.__kwdefaults__, obj.__annotations__, obj.__closure__, vars(obj))
        return super().reducer_override(obj)

    def _with_token(self, obj: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        return reduced


class _ToDriver(Pickler):
    """Pickles classes and functions that came from the driver by their token."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and _is_of_script(obj) and (token := _token_of(obj)) is not None:
            return _known, (token,)
        return super().reducer_override(obj)


def _bind(token: str, make: Callable[..., Any], *arguments: Any) -> Any:
    """Return the object with a token. Create it if this process does not have it yet."""
    obj = _objects.get(token)
    if obj is None:
        obj = make(*arguments)
        _tokens[obj], _objects[token] = token, obj
    return obj


def _known(token: str) -> Any:
    obj = _objects.get(token)
    if obj is None:
        raise LookupError("a class or function of the script to which it refers is missing in this process")
    return obj


def _token_of(obj: Any) -> str | None:
    try:
        return _tokens.get(obj)
    except TypeError:  # a metaclass made the class unhashable
        return None


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


@dataclass(slots=True)
class _Needs:
    """The needs of a global of the script.

    Attributes:
        packages: the packages that are imported when it is loaded.
        parts: the names of the definitions that are loaded first, such as base classes.
        names: the globals that it uses when it runs.
        problem: the reason for which it is not sent; empty if it is sent.
    """

    packages: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    problem: str = ""


def _further_definitions(
    script: Mapping[str, Any], sent: Collection[str], packages: Collection[str], reduce: _Reduce
) -> tuple[list[str], list[str], dict[str, str]]:
    """Return the names of part 2, the names of part 3, and the reasons for which other globals are absent."""
    definitions = {id(value): name for name, value in script.items() if _is_definition(value)}
    needs: dict[str, _Needs] = {}
    queue = list(definitions.values())
    while queue:
        name = queue.pop()
        if name in script and name not in needs and name not in sent:
            needs[name] = found = _inspect(script[name], definitions, reduce)
            queue += found.names | found.parts
    absent = {name: each.problem for name, each in needs.items() if each.problem}
    for name in _reaching(absent, {name: each.parts for name, each in needs.items()}) - absent.keys():
        absent[name] = "a definition that it contains cannot be sent"
    late = {name for name, each in needs.items() if not each.packages <= {*packages}}
    late = _reaching(late, {name: each.parts | each.names for name, each in needs.items()})
    good = [name for name in script if name in needs and name not in absent]
    return [name for name in good if name not in late], [name for name in good if name in late], absent


def _reaching(targets: Iterable[str], edges: Mapping[str, set[str]]) -> set[str]:
    """Return the targets, and all names from which a path leads to a target."""
    found = set(targets)
    while more := {name for name, ends in edges.items() if name not in found and ends & found}:
        found |= more
    return found


def _inspect(value: Any, definitions: Mapping[int, str], reduce: _Reduce) -> _Needs:
    if not _is_definition(value) and not isinstance(value, _BY_NAME) and not _is_plain(value):
        return _Needs(problem=_NOT_USED)
    inspector = _Inspector(definitions, value, reduce)
    try:
        inspector.dump(value)
    except Exception as error:  # a user's object may raise any exception
        return _Needs(problem=f"{type(error).__name__}: {error}")
    return _Needs(inspector.packages, inspector.parts, inspector.names)


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the globals to which a function and the functions in it refer."""
    for instruction in dis.get_instructions(code):
        if instruction.opname.endswith("_GLOBAL"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _script_of(function: Any) -> Mapping[str, Any]:
    """Return the globals of the script that defines a train function; those of ``__main__`` if no script does."""
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    namespace: Mapping[str, Any] = getattr(function, "__globals__", {})
    return namespace if namespace.get("__name__") == _MAIN else vars(sys.modules[_MAIN])


def _is_definition(value: Any) -> bool:
    return isinstance(value, (type, FunctionType, _Cached)) and getattr(value, "__module__", None) == _MAIN


def _is_of_script(obj: Any) -> bool:
    if isinstance(obj, FunctionType):
        return bool(obj.__globals__.get("__name__") == _MAIN)
    return isinstance(obj, type) and getattr(obj, "__module__", None) == _MAIN


def _is_plain(value: Any) -> bool:
    """Return True for numbers, texts and small collections of them."""
    queue = [value]
    for count, item in enumerate(queue):
        if (isinstance(item, (str, bytes)) and len(item) > _MAX_TEXT) or count > _MAX_ITEMS:
            return False
        if type(item) is dict:
            queue += [*item.keys(), *item.values()]
        elif type(item) in (list, tuple, set, frozenset):
            queue += item
        elif type(item) not in (str, bytes, int, float, complex, bool, type(None)):
            return False
    return True


def _package_of(obj: Any) -> str:
    module = obj.__name__ if isinstance(obj, ModuleType) else obj.__module__
    return str(module or "builtins").partition(".")[0]

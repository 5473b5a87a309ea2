"""Stand-ins for the objects that a method of SGLang reads while it is run on its own."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from inkling_sconv.names import CONFIG_MODULES


# A dataclass: SGLang copies some of what it stands for with dataclasses.replace.
@dataclasses.dataclass(init=False)
class Blank:
    """An object without content, or a configuration in which nothing is set.

    It is falsy, and order comparisons are False. Its attributes, items and results are blank too.
    """

    def __init__(self, *_: Any, **__: Any):
        pass

    def __getattr__(self, name: str) -> Blank:
        if name.startswith("__"):
            raise AttributeError(name)
        return Blank()

    def __call__(self, *_: Any, **__: Any) -> Blank:
        return Blank()

    def __getitem__(self, _: Any) -> Blank:
        return Blank()

    def __bool__(self) -> bool:
        return False

    def __lt__(self, _: Any) -> bool:
        return False

    __gt__ = __le__ = __ge__ = __lt__


class Stub(Blank):
    """An object with the given attributes. Every other attribute is blank."""

    def __init__(self, **given: Any):
        self.__dict__.update(given)

    def __bool__(self) -> bool:
        return True


class AllOn:
    """A configuration in which every switch is on, except ``disable...`` and the ``given`` ones.

    A given bool becomes a method that returns it. Other switches work as a property and as a
    method, since releases differ in that.
    """

    def __init__(self, **given: Any):
        self.given = given

    def __getattr__(self, name: str) -> Any:
        if name in self.given:
            value = self.given[name]
            return (lambda: value) if isinstance(value, bool) else value
        if name.startswith("__"):
            raise AttributeError(name)
        return False if name.startswith("disable") else AllOn()

    def __call__(self) -> bool:
        return True


class Override:
    """An existing object with the ``given`` attributes replaced."""

    def __init__(self, original: Any, **given: Any):
        self.__dict__.update(given, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@contextlib.contextmanager
def use_configuration(namespace: dict[str, Any], configuration: Any) -> Iterator[None]:
    """Patch SGLang's configuration getters in ``namespace`` to return ``configuration``.

    ``namespace`` is a module's ``vars()`` or a function's ``__globals__``. It is restored on exit.
    """
    saved = {
        name: value
        for name, value in namespace.items()
        if inspect.isfunction(value) and value.__module__ in CONFIG_MODULES
    }
    namespace.update(dict.fromkeys(saved, lambda: configuration))
    try:
        yield
    finally:
        namespace.update(saved)


def make_instance(cls: type, method: str, **given: Any) -> Any:
    """Make an instance of ``cls``, without ``__init__``, on which only ``method`` is real.

    ``given`` are its attributes. All others are blank, inherited ones included.
    """
    names: dict[str, Any] = {
        name: Blank()
        for base in cls.__mro__[:-1]
        for name, value in vars(base).items()
        if name != method
        and not name.startswith(("__", "_inkling_sconv"))
        and (inspect.isfunction(value) or isinstance(value, property | staticmethod | classmethod))
    }
    names |= {
        name: staticmethod(value) if inspect.isfunction(value) else value
        for name, value in given.items()
    }
    names["__getattr__"] = lambda self, name: Blank()
    return object.__new__(type(cls.__name__, (cls,), names))

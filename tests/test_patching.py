"""The patch layer's rules, on a made-up module: all or nothing, reversible, never silent."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_loco import patching
from megatron_loco.patching import Patch, SeamError

NAME = "patched_module_of_the_tests"

SOURCE = """
class Base:
    def inherited(self, x):
        return ("inherited", x)


class Thing(Base):
    def method(self, x, *, scale=1):
        return ("method", x, scale)

    @staticmethod
    def static(x):
        return ("static", x)

    @classmethod
    def klass(cls, x):
        return (cls.__name__, x)

    class Inner:
        def deep(self):
            return "deep"


def function(x, group=None):
    return ("function", x)


constant = 5
built_in = len
nothing = None
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    # A real file, because a fingerprint is taken from the source.
    path = tmp_path / f"{NAME}.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[NAME]


def patch(path: str, new: Any, kind: Any = "replace", **settings: Any) -> Patch:
    return Patch(target=f"{NAME}:{path}", kind=kind, new=new, why="a test", **settings)


def contents(module: Any) -> dict[str, Any]:
    """Every attribute as stored, to find what was left behind."""
    return {
        **{f":{name}": value for name, value in vars(module).items()},
        **{f"Base.{name}": value for name, value in vars(module.Base).items()},
        **{f"Thing.{name}": value for name, value in vars(module.Thing).items()},
        **{f"Inner.{name}": value for name, value in vars(module.Thing.Inner).items()},
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return list(before) == list(after) and all(before[name] is after[name] for name in before)


def tagging(tag: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (tag, original(*args, **kwargs))

    return wrap


def test_replace_and_remove(module: Any) -> None:
    before = contents(module)
    original = module.function
    handle = patching.apply([patch("function", lambda x, group=None: ("new", x))])
    assert module.function(1) == ("new", 1)
    assert handle.targets == (f"{NAME}:function",)
    assert handle.original(f"{NAME}:function") is original
    handle.remove()
    assert module.function(1) == ("function", 1)
    assert same(before, contents(module))
    assert not handle.targets


def test_wrap_gets_the_original(module: Any) -> None:
    with patching.apply([patch("Thing.method", tagging("wrapped"), "wrap")]):
        assert module.Thing().method(1, scale=3) == ("wrapped", ("method", 1, 3))
    assert module.Thing().method(1, scale=3) == ("method", 1, 3)


def test_replace_does_not_call_what_it_installs(module: Any) -> None:
    def explode(*args: Any) -> None:
        raise AssertionError("called while it was installed")

    with patching.apply([patch("function", explode)]):
        assert module.function is explode


def test_nested_class_and_plain_value(module: Any) -> None:
    before = contents(module)
    with patching.apply([patch("Thing.Inner.deep", lambda self: "new"), patch("constant", 6), patch("nothing", 7)]):
        assert module.Thing.Inner().deep() == "new"
        assert (module.constant, module.nothing) == (6, 7)
    assert same(before, contents(module))


def test_inherited_attribute_is_restored_by_deletion(module: Any) -> None:
    before = contents(module)
    with patching.apply([patch("Thing.inherited", tagging("wrapped"), "wrap")]):
        assert module.Thing().inherited(1) == ("wrapped", ("inherited", 1))
        assert module.Base().inherited(1) == ("inherited", 1)
    assert "inherited" not in vars(module.Thing)
    assert same(before, contents(module))
    # What the base gets afterwards is seen through the subclass again; a copy of the original would hide it.
    module.Base.inherited = lambda self, x: "changed base"
    assert module.Thing().inherited(1) == "changed base"


def test_static_and_class_methods_are_restored_as_stored(module: Any) -> None:
    before = contents(module)
    new = staticmethod(lambda x: "new")
    with patching.apply([patch("Thing.static", new), patch("Thing.klass", classmethod(lambda cls, x: "new"))]):
        assert module.Thing().static(1) == module.Thing.klass(1) == "new"
    assert isinstance(vars(module.Thing)["static"], staticmethod)
    assert same(before, contents(module))
    assert module.Thing.klass(1) == ("Thing", 1)


def test_validation_lists_every_mismatch_and_installs_nothing(module: Any) -> None:
    before = contents(module)
    factories: list[str] = []

    def factory(original: Any) -> Any:
        factories.append("called")
        return original

    unknown = frozenset({"0123456789abcdef"})
    patches = [
        patch("function", factory, "wrap", parameters=("x", "group")),  # fits, and must not be installed either
        patch("Thing.no_such_method", factory, "wrap"),
        patch("NoSuchClass.method", factory, "wrap"),
        Patch(target="no_such_module_anywhere:f", kind="wrap", new=factory, why="a test"),
        patch("Thing.method", factory, "wrap", parameters=("x", "absent_1", "absent_2"), sources=unknown),
        patch("built_in", factory, "wrap", sources=unknown),  # has no source text
        patch("constant", factory, "wrap", parameters=("absent_3",)),  # has no parameters
    ]
    with pytest.raises(SeamError) as caught:
        patching.apply(patches)
    message = str(caught.value)
    for part in (
        "Thing.no_such_method",
        "NoSuchClass.method",
        "no_such_module_anywhere:f",
        "absent_1, absent_2",
        "unknown source",
        "0123456789abcdef",
        "built_in",
        "constant",
    ):
        assert part in message
    assert f"{NAME}:function" not in message
    assert factories == []
    assert same(before, contents(module))


@pytest.mark.parametrize("target", ["", ":function", NAME, f"{NAME}:", f"{NAME}:Thing..method", "json:.dumps"])
def test_malformed_target_is_a_seam_error(module: Any, target: str) -> None:
    with pytest.raises(SeamError):
        patching.apply([Patch(target=target, kind="replace", new=1, why="a test")])


def test_check_validates_and_installs_nothing(module: Any) -> None:
    before = contents(module)
    known = patching.fingerprint(module.function)
    handle = patching.apply([patch("function", None, "check", parameters=("x",), sources=frozenset({known}))])
    assert handle.targets == ()
    assert same(before, contents(module))
    with pytest.raises(SeamError, match="unknown source"):
        patching.apply([patch("function", None, "check", sources=frozenset({"f" * 16}))])


@pytest.mark.parametrize("kind", ["wrpa", "", "Replace", None])
def test_unknown_kind_is_refused(module: Any, kind: Any) -> None:
    # Rule 1: the kind is never guessed. A misspelt ``wrap`` must not install the factory as the replacement.
    before = contents(module)
    with pytest.raises((ValueError, SeamError), match=r"replace.*wrap"):
        patching.apply([patch("function", tagging("wrapped"), kind)])
    assert same(before, contents(module))


def test_known_source_is_accepted_unknown_refused_or_allowed(module: Any) -> None:
    known = patching.fingerprint(module.function)
    new = tagging("wrapped")
    with patching.apply([patch("function", new, "wrap", sources=frozenset({known, "f" * 16}))]):
        assert module.function(1)[0] == "wrapped"

    unknown = patch("function", new, "wrap", sources=frozenset({"f" * 16}))
    with pytest.raises(SeamError, match=f"unknown source {known}"):
        patching.apply([unknown])
    with patching.apply([unknown], allow_unknown_source=True):
        assert module.function(1)[0] == "wrapped"
    # The override is for the source alone: a missing parameter still refuses.
    with pytest.raises(SeamError, match="no parameter absent"):
        patching.apply([patch("function", new, "wrap", parameters=("absent",))], allow_unknown_source=True)


def test_unknown_source_may_be_allowed_where_there_is_none(module: Any) -> None:
    with patching.apply([patch("built_in", len, sources=frozenset({"f" * 16}))], allow_unknown_source=True):
        assert module.built_in([1]) == 1


def test_fingerprint_is_that_of_the_text(module: Any) -> None:
    text = 'def deep(self):\n    return "deep"'
    # Indentation apart: a method's text is taken as if it stood at the left margin.
    assert patching.fingerprint(module.Thing.Inner.deep) == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert patching.fingerprint(module.Thing.method) != patching.fingerprint(module.function)


def test_decorators_in_the_file_do_not_hide_the_text(module: Any, tmp_path: Path) -> None:
    """Ours, and torch's; what somebody else puts around a function is another text."""
    plain = "@torch.no_grad()\ndef f(x):\n    return x\n"
    expected = hashlib.sha256(plain.strip().encode()).hexdigest()[:16]
    assert patching.fingerprint_text(plain) == expected
    for name, text in {"plain": plain, "ours": f"@loco_seam\n{plain}"}.items():
        (tmp_path / f"{name}.py").write_text(text)
        code = compile(text, str(tmp_path / f"{name}.py"), "exec")
        exec(code, scope := {"torch": torch, "loco_seam": lambda stock: patching.decorate(stock, lambda x: x)})
        assert patching.fingerprint(scope["f"]) == expected
    ours = scope["f"]
    assert ours.__name__ == "f"
    assert patching.stock_of(ours) is not ours

    @functools.wraps(ours)
    def foreign(x: Any) -> Any:
        return ours(x)

    assert patching.stock_of(foreign) is foreign
    assert patching.fingerprint(foreign) != patching.fingerprint(ours)


def test_remove_refuses_when_somebody_patched_on_top(module: Any) -> None:
    before = contents(module)
    handle = patching.apply([patch("function", tagging("a"), "wrap"), patch("Thing.method", tagging("b"), "wrap")])
    ours = module.function

    @functools.wraps(ours)
    def foreign(*args: Any, **kwargs: Any) -> Any:
        return ("foreign", ours(*args, **kwargs))

    module.function = foreign
    with pytest.raises(RuntimeError, match=rf"{NAME}:function") as caught:
        handle.remove()
    assert "Thing.method" not in str(caught.value)
    # Nothing was restored: neither the foreign patch nor the one that could have been removed.
    assert module.function is foreign
    assert module.Thing().method(1) == ("b", ("method", 1, 1))
    # Once the foreign one is undone, removal works.
    module.function = ours
    handle.remove()
    assert same(before, contents(module))


def test_remove_refuses_when_the_attribute_is_gone(module: Any) -> None:
    # ``None`` as the replacement must not be taken for an attribute that is not there.
    for new in (None, 7):
        handle = patching.apply([patch("constant", new)])
        del module.constant
        with pytest.raises(RuntimeError, match="constant"):
            handle.remove()
        module.constant = new
        handle.remove()
        assert module.constant == 5


def test_second_handle_on_top_must_go_first(module: Any) -> None:
    before = contents(module)
    first = patching.apply([patch("function", tagging("first"), "wrap")])
    second = patching.apply([patch("function", tagging("second"), "wrap")])
    assert module.function(1) == ("second", ("first", ("function", 1)))
    with pytest.raises(RuntimeError, match="function"):
        first.remove()
    second.remove()
    assert module.function(1) == ("first", ("function", 1))
    first.remove()
    assert same(before, contents(module))


def test_two_patches_on_one_target_are_removed_in_reverse(module: Any) -> None:
    before = contents(module)
    handle = patching.apply(
        [
            patch("function", tagging("inner"), "wrap"),
            patch("Thing.inherited", tagging("x"), "wrap"),
            patch("function", tagging("outer"), "wrap"),
            patch("Thing.inherited", tagging("y"), "wrap"),
        ]
    )
    assert module.function(1) == ("outer", ("inner", ("function", 1)))
    assert module.Thing().inherited(1) == ("y", ("x", ("inherited", 1)))
    handle.remove()
    assert same(before, contents(module))


def test_two_patches_on_one_target_refuse_a_foreign_one(module: Any) -> None:
    handle = patching.apply([patch("constant", 1), patch("constant", 2)])
    module.constant = 3
    with pytest.raises(RuntimeError, match="constant"):
        handle.remove()
    assert module.constant == 3
    module.constant = 2
    handle.remove()
    assert module.constant == 5


def test_remove_twice_does_nothing(module: Any) -> None:
    handle = patching.apply([patch("constant", 6)])
    handle.remove()
    module.constant = 9  # somebody else's, later: none of our business any more
    handle.remove()
    assert module.constant == 9


def test_context_manager_restores_after_an_exception(module: Any) -> None:
    before = contents(module)

    def body() -> None:
        with patching.apply([patch("constant", 6)]):
            assert module.constant == 6
            raise KeyError("from the body")

    with pytest.raises(KeyError, match="from the body"):
        body()
    assert same(before, contents(module))


def test_exception_in_a_factory_rolls_back(module: Any) -> None:
    before = contents(module)

    def broken(original: Any) -> Any:
        assert module.constant == 6  # the first patch was installed by then
        raise KeyError("from the factory")

    with pytest.raises(KeyError, match="from the factory"):
        patching.apply(
            [patch("constant", 6), patch("Thing.inherited", tagging("x"), "wrap"), patch("function", broken, "wrap")]
        )
    assert same(before, contents(module))


def test_original_of_an_unknown_target_is_a_key_error(module: Any) -> None:
    with patching.apply([patch("constant", 6)]) as handle:
        assert handle.original(f"{NAME}:constant") == 5
        with pytest.raises(KeyError, match="function"):
            handle.original(f"{NAME}:function")


def test_nothing_to_patch() -> None:
    with patching.apply([]) as handle:
        assert handle.targets == ()

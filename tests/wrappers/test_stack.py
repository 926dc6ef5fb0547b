"""Wrappers simplify from the outside in, and put back from the inside out."""

from __future__ import annotations

from dataclasses import dataclass

from jointcut.wrappers.metadata.convention import Convention, Slot
from jointcut.wrappers.stack import pre_compile
from jointcut.wrappers.wrapper import Target


@dataclass(frozen=True)
class Named:
    """A wrapper that writes its name around what it is given."""

    name: str

    def pre_compile(self, target):
        given = target.convention
        return Target(
            lambda x: f"{self.name}<{target.function(x)}>",
            Convention((*given.inputs, Slot(self.name, (), "int32")), ()),
        )

    def post_compile(self, call, target):
        return lambda x: f"{self.name}({call(x)})"


def test_the_order_of_a_stack():
    seen = []

    class Watching(Named):
        def post_compile(self, call, target):
            seen.append((self.name, [slot.path for slot in target.convention.inputs]))
            return super().post_compile(call, target)

    wrapped = pre_compile([Watching("a"), Watching("b")], Target(str, Convention((), ())))
    assert wrapped.target.function(1) == "b<a<1>>"
    assert [slot.path for slot in wrapped.target.convention.inputs] == ["a", "b"]
    assert wrapped.post_compile(lambda x: f"run {x}")(1) == "a(b(run 1))"
    assert [name for name, _ in seen] == ["b", "a"]


def test_an_empty_stack_changes_nothing():
    target = Target(str, Convention((), ()))
    wrapped = pre_compile([], target)
    assert wrapped.target is target
    assert wrapped.post_compile(str) is str


def test_a_stack_applies_more_than_once():
    wrapped = pre_compile([Named("a")], Target(str, Convention((), ())))
    assert wrapped.post_compile(str)(1) == wrapped.post_compile(str)(1) == "a(1)"

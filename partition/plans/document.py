"""Check the types of everything in a plan's text, before any of it is used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jointcut.partition.errors import PlanError, message
from jointcut.partition.packing.forms import FORMS
from jointcut.partition.program.jax.abstract import HOST

_CURE = "Read what dumps wrote, unchanged; to plan otherwise, use Plan.of(graph, saved=[...])."


def refuse(where: str, what: str, cure: str = _CURE) -> PlanError:
    """Return the error of a plan that cannot be read."""
    return PlanError(message(where, what, cure))


def shown(given: Any) -> str:
    """A value as it stands in a plan, in at most 60 characters."""
    text = json.dumps(given, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


_Check = Callable[[Any, str], None]


def _is_text(given: Any, where: str) -> None:
    if not isinstance(given, str):
        raise refuse(where, f"is {shown(given)}, not a text.")


def _is_whole(given: Any, where: str) -> None:
    if type(given) is not int:
        raise refuse(where, f"is {shown(given)}, not a whole number.")


def _is_count(given: Any, where: str) -> None:
    if type(given) is not int or given < 0:
        raise refuse(where, f"is {shown(given)}, not a whole number from 0 up.")


def _is_flag(given: Any, where: str) -> None:
    if not isinstance(given, bool):
        raise refuse(where, f"is {shown(given)}, not true or false.")


def _is_amount(given: Any, where: str) -> None:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= sys.float_info.max:
        raise refuse(where, f"is {shown(given)}, not a finite number from 0 up.")


def _is_host(given: Any, where: str) -> None:
    if given != HOST:
        raise refuse(where, f"is {shown(given)}, not {shown(HOST)}: other values have no such entry.")


def _is_form(given: Any, where: str) -> None:
    if not isinstance(given, str) or given not in FORMS:
        raise refuse(where, f"is {shown(given)}, not one of {', '.join(map(shown, FORMS))}.")


def _or_null(check: _Check) -> _Check:
    return lambda given, where: None if given is None else check(given, where)


def _list_of(check: _Check) -> _Check:
    def check_list(given: Any, where: str) -> None:
        if not isinstance(given, list):
            raise refuse(where, f"is {shown(given)}, not a list.")
        for n, item in enumerate(given):
            check(item, f"{where}[{n}]")

    return check_list


def _record(fields: Mapping[str, _Check], optional: Mapping[str, _Check] | None = None) -> _Check:
    more = optional or {}

    def check_record(given: Any, where: str) -> None:
        if not isinstance(given, dict):
            raise refuse(where, f"is {shown(given)}, not an object.")
        if missing := sorted(fields.keys() - given.keys()):
            raise refuse(where, f"lacks {', '.join(map(repr, missing))}.")
        if unknown := sorted(given.keys() - fields.keys() - more.keys()):
            raise refuse(where, f"holds {', '.join(map(shown, unknown))}, which this version does not know.")
        for name, check in (*fields.items(), *more.items()):
            if name in given:
                check(given[name], f"{where}.{name}")

    return check_record


#: The figures of a plan, with the check of each.
FIGURES: dict[str, _Check] = {
    **dict.fromkeys(("bound_bytes", "peak_bytes"), _or_null(_is_count)),
    "bytes_spared": _is_whole,
    **dict.fromkeys(("seconds", "bound_seconds"), _or_null(_is_amount)),
}
_saved: dict[str, _Check] = {
    **dict.fromkeys(("value", "copies", "bytes"), _is_count),
    **dict.fromkeys(("dtype", "op", "scope", "source", "reason"), _is_text),
    "shape": _list_of(_is_count),
}
_tile = _record(
    {
        **dict.fromkeys(("value", "axis", "least_bytes", "blocks"), _is_count),
        "is_early": _is_flag,
        "array": _is_text,
        "block_bytes": _or_null(_is_count),
    },
    {"over": _list_of(_is_text)},
)
#: The numbers of steps of a saved value of which a part lies elsewhere.
PARTS: dict[str, _Check] = dict.fromkeys(("host_steps", "loop_steps"), _is_count)
#: Refuses a document that is no plan by its types.
has_types = _record(
    {
        **dict.fromkeys(("version", "bytes_saved"), _is_count),
        **dict.fromkeys(("format", "checksum", "strategy"), _is_text),
        **dict.fromkeys(("recomputed", "deferred"), _list_of(_is_count)),
        "saved": _list_of(_record(_saved, {"memory": _is_host, "form": _is_form, **PARTS})),
        "segments": _list_of(_record({"loop": _is_count, "steps": _is_count}, {"kept": _is_count})),
        "figures": _record(FIGURES),
        "written_for": _list_of(_is_text),
    },
    {
        "dropped": _list_of(_is_count),
        "on_device": _list_of(_record({"loop": _is_count, "kept": _is_count})),
        "tiles": _list_of(_tile),
        "checkpoints": _list_of(_record({"op": _is_count, "number": _is_count})),
    },
)

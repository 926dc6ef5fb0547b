"""Read protocol buffers without their schema.

XLA describes an executable in serialised messages. A message is a list of numbered fields; `decode` splits it into
them. Callers use the field numbers of `xla/service/hlo.proto`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Message = dict[int, list[Any]]

FIXED_SIZES = {1: 8, 5: 4}


def decode(data: bytes) -> Message:
    """Split one message into its fields: integers, or bytes to be decoded in turn."""
    fields: Message = defaultdict(list)
    start = 0
    while start < len(data):
        key, start = varint(data, start)
        kind = key & 7
        if kind == 0:
            value, start = varint(data, start)
        else:
            size, start = varint(data, start) if kind == 2 else (FIXED_SIZES[kind], start)
            value, start = data[start : start + size], start + size
        fields[key >> 3].append(value)
    return fields


def varint(data: bytes, start: int) -> tuple[int, int]:
    """Read one variable-length integer; return it and the position after it."""
    value = shift = 0
    while True:
        byte = data[start]
        start += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, start


def packed(message: Message, name: int) -> Iterator[int]:
    """Yield the integers of a repeated field, packed or not."""
    for value in message.get(name, []):
        if isinstance(value, int):
            yield value
            continue
        start = 0
        while start < len(value):
            item, start = varint(value, start)
            yield item


def number(message: Message, name: int) -> int:
    """Return an integer field, 0 if absent."""
    return message.get(name, [0])[0]


def text(message: Message, name: int) -> str:
    """Return a text field, empty if absent."""
    return message.get(name, [b""])[0].decode()

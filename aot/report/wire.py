"""Read protocol buffers without their schema.

XLA hands out what it knows of an executable as serialised messages. A message is a list of numbered fields;
this reader splits it into them and leaves their meaning to the caller, who takes the numbers from
`xla/service/hlo.proto`.
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
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at)
        else:
            size, at = varint(data, at) if kind == 2 else (FIXED_SIZES[kind], at)
            value, at = data[at : at + size], at + size
        fields[key >> 3].append(value)
    return fields


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Read one variable-length integer; return it and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def packed(message: Message, name: int) -> Iterator[int]:
    """The integers of a repeated field, packed or not."""
    for value in message.get(name, []):
        if isinstance(value, int):
            yield value
            continue
        at = 0
        while at < len(value):
            item, at = varint(value, at)
            yield item


def number(message: Message, name: int) -> int:
    """An integer field, zero when absent."""
    return message.get(name, [0])[0]


def text(message: Message, name: int) -> str:
    """A text field, empty when absent."""
    return message.get(name, [b""])[0].decode()

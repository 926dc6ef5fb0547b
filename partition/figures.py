"""Write bytes, seconds and counts as people read them."""

from __future__ import annotations

#: Decimal units of bytes, the largest first.
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, which is in the plural unless the count is one.

    >>> counted(1, "array"), counted(1_200, "array")
    ('1 array', '1,200 arrays')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def per_device(devices: int) -> str:
    """Return what a figure in bytes says beside itself, if several devices run the program together.

    >>> per_device(8), per_device(1)
    (' per device', '')
    """
    return " per device" if devices > 1 else ""


def human_bytes(count: float) -> str:
    """Return a number of bytes as people read it, in decimal units.

    >>> human_bytes(47_200_000), human_bytes(960), human_bytes(0)
    ('47.2 MB', '960 B', '0 B')
    """
    for unit, name in BYTE_UNITS:
        if abs(count) >= 0.9995 * unit:
            number = count / unit
            return (
                f"{number:,.0f} {name}"
                if abs(number) >= 999.5
                else f"{number:.{1 if abs(number) >= 9.995 else 2}f} {name}"
            )
    return f"{count:.0f} B"


def human_seconds(seconds: float) -> str:
    """Return a duration as people read it.

    >>> human_seconds(0.00123), human_seconds(4.5e-05), human_seconds(2)
    ('1.23 ms', '45.0 µs', '2.00 s')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= 0.9995 * unit or name == "µs":
            number = seconds / unit
            return f"{number:.{max(0, 3 - len(str(int(abs(number)))))}f} {name}" if seconds else "0 s"
    raise AssertionError("the last unit takes any number")

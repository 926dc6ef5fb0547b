"""Bind a function of ours to an instance."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from jointcut.aot.report.report import Report
from jointcut.aot.stages import Traced


class Method:
    """A function of ours bound to an instance, as `obj.loss` is."""

    def __init__(self, function: Any, instance: Any) -> None:
        """Made by attribute access; not by hand."""
        self._bound = function, instance
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function, with the instance in front."""
        return self._bound[0](self._bound[1], *args, **kwargs)

    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """As `Function.value_and_grad`; the instance is argument 0."""
        return self._bound[0].value_and_grad(self._bound[1], *args, **kwargs)

    def grad(self, *args: Any, **kwargs: Any) -> Any:
        """As `Function.grad`; the instance is argument 0."""
        return self._bound[0].grad(self._bound[1], *args, **kwargs)

    def vjp(self, *args: Any, **kwargs: Any) -> Any:
        """As `Function.vjp`; the instance is argument 0."""
        return self._bound[0].vjp(self._bound[1], *args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """As `Function.explain`; the instance is argument 0."""
        return self._bound[0].explain(self._bound[1], *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """As `Function.trace`; the instance is argument 0."""
        return self._bound[0].trace(self._bound[1], *args, **kwargs)

    def export(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Path:
        """As `Function.export`; the instance is argument 0."""
        return self._bound[0].export(path, self._bound[1], *args, **kwargs)

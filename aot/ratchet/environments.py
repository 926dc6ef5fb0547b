"""Make an environment for each version of JAX, once, and keep it for later runs.

An environment is found by the version, the requirements and the project's files that say these. It is made by `venv`
and pip with the first Python on this machine that can have the version: JAX 0.12 needs Python 3.12, say. Pip asks
wherever its settings say.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from jointcut.aot.cache.folder import locked
from jointcut.aot.planning.budgets.rates_file import cache_folder
from jointcut.partition.errors import PeakError, message

OPTION = "--peak-versions"
_GIVE = f"Give versions of JAX, or Pythons of environments that have one: {OPTION}='0.10.2 0.12'."

_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.dev)\d+)?")
_PATIENCE_S = 1800.0  # another process makes the same environment
_ASK = "import jointcut.ratchet, platform, importlib.metadata as m; print(m.version('jax'), platform.python_version())"


@dataclass(frozen=True)
class Environment:
    """A Python that has JAX, jointcut and pytest.

    Attributes:
        python: the interpreter.
        jax: the version of JAX that it has.
        version: that of Python.
    """

    python: Path
    jax: str
    version: str


def environments(given: str, requires: Sequence[str], root: Path, say: Callable[[str], None]) -> list[Environment]:
    """Return the environments for a list such as `0.10.2 0.12`, in its order; those that are missing are made.

    An item with a slash is the Python of an environment, which is taken as it is. `requires` is what pip installs
    besides JAX, pytest and jointcut; nothing for the project itself, if it can be installed. `say` is told of what
    takes long. Raises `PeakError` for a list that cannot be read, and for environments that cannot be made.
    """
    items = shlex.split(given)
    for item in items:
        if not (os.sep in item or _VERSION.fullmatch(item)):
            what = f"has {item!r}, which is no version of JAX and no path of a Python."
            raise PeakError(message(OPTION, what, _GIVE))
    if not items:
        raise PeakError(message(OPTION, "names no version.", _GIVE))
    wanted = [*_jointcut(), *(requires or _project(root))]
    found = [_given(item) if os.sep in item else _made(item, wanted, root, say) for item in items]
    for place, each in enumerate(found):
        if each.jax in [other.jax for other in found[:place]]:
            what = f"names JAX {each.jax} twice, the second time by {items[place]!r}."
            raise PeakError(message(OPTION, what, "Name each version once."))
    return found


def _given(item: str) -> Environment:
    """Return an environment of the user."""
    found = _asked(Path(item).expanduser().absolute())
    if isinstance(found, str):
        cure = "Install jax, pytest and jointcut there, or give a version, for which an environment is made."
        raise PeakError(message(f"{OPTION} names {item}, which", f"does not serve: {found}.", cure))
    return found


def _asked(python: Path) -> Environment | str:
    """Return the environment of an interpreter, or what stops it."""
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error.strerror)
    if done.returncode:
        return next(reversed(done.stderr.strip().splitlines()), f"it ends with code {done.returncode}")
    jax, version = done.stdout.split()
    return Environment(python, jax, version)


# --------------------------------------------------------------------------------------------------- what it needs


def _jointcut() -> list[str]:
    """Return what pip installs for jointcut: that which runs here."""
    here = distribution("jointcut")
    text = here.read_text("direct_url.json")
    if text is None:
        return [f"jointcut=={here.version}"]
    source = json.loads(text)
    if "vcs_info" in source:
        kind, commit = source["vcs_info"]["vcs"], source["vcs_info"]["commit_id"]
        return [f"{kind}+{source['url']}@{commit}"]
    return ["-e"] * source.get("dir_info", {}).get("editable", False) + [source["url"]]


def _project(root: Path) -> list[str]:
    """Return what pip installs for the project itself."""
    settings = root / "pyproject.toml"
    parts = tomllib.loads(settings.read_text("utf-8")) if settings.exists() else {}
    can_be_installed = {"project", "build-system"} & parts.keys() or (root / "setup.py").exists()
    return [f"-e {shlex.quote(str(root))}"] if can_be_installed else []


# ------------------------------------------------------------------------------------------------------- making it


def _made(wanted: str, requires: Sequence[str], root: Path, say: Callable[[str], None]) -> Environment:
    """Return the environment for a version of JAX, which is made if it is missing."""
    options = [part for line in requires for part in shlex.split(line)]
    folder = cache_folder() / "environments" / f"jax-{wanted}-{_digest(options, root)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, "lock", _PATIENCE_S):
            if isinstance(found := _asked(_python_in(folder)), Environment) and (folder / "complete").exists():
                return found
            return _filled(folder, wanted, options, root, say)
    except OSError as error:
        cure = "Name another folder by the variable JOINTCUT_CACHE_DIR."
        what = f"cannot be used: {error.strerror}."
        raise PeakError(message(f"{OPTION}: the folder {folder}", what, cure)) from error


def _filled(folder: Path, wanted: str, options: Sequence[str], root: Path, say: Callable[[str], None]) -> Environment:
    """Make an environment with the first Python for which pip finds everything."""
    jax = f"jax=={wanted}" if re.search("[a-z]", wanted) else f"jax=={wanted}.*"  # 0.12 is its newest mend
    tried = []
    for python in interpreters():
        say(f"Making an environment with JAX {wanted} by {python}, once, in {folder}")
        shutil.rmtree(folder / "venv", ignore_errors=True)
        failed = _run([python, "-m", "venv", folder / "venv"], root) or _run(
            [_python_in(folder), "-I", "-m", "pip", "install", "--quiet", jax, "pytest", *options], root
        )
        found = failed or _asked(_python_in(folder))
        if isinstance(found, Environment):
            (folder / "complete").touch()
            return found
        tried.append(f"  {python}: {found}")
    cure = (
        "Give a version that pip finds, put a Python that can have it on the PATH, mend peak_requires in\n"
        f"[tool.pytest.ini_options], or give the Python of an environment of yours: {OPTION}='my/bin/python'."
    )
    raise PeakError(message(f"{OPTION}: JAX {wanted}", "\n".join(["cannot be installed with", *tried]), cure))


def _python_in(folder: Path) -> Path:
    return folder / "venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _run(line: Sequence[str | Path], root: Path) -> str:
    """Run a command in the project's folder; returns what stopped it, nothing if it went well."""
    done = subprocess.run(line, cwd=root, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    lines = [*done.stdout.strip().splitlines(), *done.stderr.strip().splitlines()] or [f"code {done.returncode}"]
    return next((text for text in reversed(lines) if text.startswith("ERROR: ")), lines[-1]).removeprefix("ERROR: ")


def _digest(options: Sequence[str], root: Path) -> str:
    """Return a short name for what pip is told, with the files of the project that say more."""
    files = {root / name for name in ("pyproject.toml", "setup.py", "setup.cfg", *options)}
    texts = [path.read_bytes() for path in sorted(files) if path.is_file()]
    return hashlib.sha256(repr((sys.platform, options, str(root), texts)).encode()).hexdigest()[:10]


def interpreters() -> Iterator[Path]:
    """Yield the Pythons of this machine that run, one for each minor version: this one first, then the newest first."""
    yield Path(sys.executable)
    kept = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    for minor in range(20, 10, -1):
        name = f"python3.{minor}"
        on_path = [Path(found)] if (found := shutil.which(name)) else []
        for python in (*on_path, *sorted(kept.glob(f"3.{minor}.*/bin/{name}"))) if minor != sys.version_info[1] else ():
            if not _run([python, "-c", ""], Path.cwd()):  # a shim of pyenv may stand for none
                yield python
                break

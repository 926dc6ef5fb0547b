"""The documentation site is built of the sources, whole, and reads without a network.

It is built once for all workers, as `make docs` builds it, with Sphinx's warnings as errors.
"""

import doctest
import fcntl
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from posixpath import normpath
from urllib.parse import unquote, urldefrag, urlsplit

import click
import pytest

from house import FOLDERS, house_at
from jointcut.aot.command import main
from page.browser import axe_findings
from page.browser import browser as browser

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LINKS = {"a": "href", "link": "href", "script": "src", "img": "src", "iframe": "src"}
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}
PYTHONS_OWN = (BaseException, OSError, object, int, str, tuple)

pytest.importorskip("sphinx", reason="the site needs pip install 'jointcut[docs]'")
pytest.importorskip("furo", reason="the site needs pip install 'jointcut[docs]'")
pytest.importorskip("myst_nb", reason="the site needs pip install 'jointcut[docs]'")


# ----------------------------------------------------------------------------------------------------- the built site


@dataclass
class Page(HTMLParser):
    """What one page holds: its anchors, its links, its text, and what is said of each name that it documents."""

    path: Path
    anchors: set[str] = field(default_factory=set)
    links: list[tuple[str, str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        super().__init__()
        self.open: list[tuple[str, str | None]] = []  # elements around, with the name that a <dd> speaks of
        self.names: list[str] = []
        self.feed(self.path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if given.get("id"):
            self.anchors.add(given["id"])
        if tag in LINKS and given.get(LINKS[tag]):
            self.links.append((tag, given[LINKS[tag]]))
        if tag == "dt" and given.get("id"):
            self.names.append(given["id"])
            self.said.setdefault(given["id"], "")
        if tag not in VOID:
            self.open.append((tag, self.names.pop() if tag == "dd" and self.names else None))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        self.words.append(data)
        around = [name for tag, name in self.open if tag == "dd"]
        if around and around[-1]:
            self.said[around[-1]] += data.strip()


@dataclass(frozen=True)
class Site:
    """All pages of the site, by their paths in it."""

    folder: Path
    pages: dict[str, Page]

    def text(self, page: str) -> str:
        return " ".join("".join(self.pages[page].words).split())


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Site:
    """The site, built by the first worker that asks for it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / "site", shared / "site is built"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            built = subprocess.run([sys.executable, DOCS / "build.py", folder], capture_output=True, text=True)
            assert built.returncode == 0, built.stdout + built.stderr
            done.touch()
    pages = {path.relative_to(folder).as_posix(): Page(path) for path in sorted(folder.rglob("*.html"))}
    return Site(folder, pages)


# ------------------------------------------------------------------------------------------------- what must be there


def offered(folder: str) -> list[str]:
    """The public names of a folder: its `__all__`, or what its `__init__` brings in under its own name."""
    module = import_module(f"jointcut.{folder}")
    source = house_at(ROOT).modules[f"jointcut.{folder}"]
    brought = [item.binds for item in source.imports if item.binds == item.name.rpartition(".")[2]]
    return [f"{module.__name__}.{name}" for name in getattr(module, "__all__", brought)]


def members(name: str) -> list[str]:
    """The public attributes, methods and properties of a class, those that it has from Python's own left out."""
    module, _, own = name.rpartition(".")
    item = getattr(import_module(module), own)
    if not isinstance(item, type):
        return []
    theirs = {attribute for owner in PYTHONS_OWN if issubclass(item, owner) for attribute in dir(owner)}
    found = {*dir(item), *getattr(item, "__dataclass_fields__", ())}
    return [f"{name}.{attribute}" for attribute in sorted(found - theirs) if attribute[0] != "_"]


PUBLIC = [name for folder in FOLDERS for name in offered(folder)]


#: What a visitor with a full GPU asks, and the page that answers.
QUESTIONS = {
    "Out of memory, what now?": "out-of-memory.html",
    "How large a batch?": "largest-batch.html",
    "Which jax.checkpoint policy equals this?": "from-checkpoint.html",
    "Memory grew after an upgrade: which line?": "after-an-upgrade.html",
    "Many GPUs?": "many-devices.html",
    "New here?": "overview.html",
}


def test_the_start_page_has_a_door_for_each_question_with_a_sentence(site):
    text = site.text("index.html")
    links = {link for _, link in site.pages["index.html"].links}
    for question, page in QUESTIONS.items():
        assert page in links
        sentence = text.partition(question)[2].partition(".\n")[0]
        assert re.match(r" [`\w].{20,}", sentence), f"nothing is said behind {question}"


def test_each_answer_opens_with_what_to_do(site):
    """Code that can be copied, or the table of policies, stands within the first screens of the page."""
    for page in list(QUESTIONS.values())[:5]:
        html = site.pages[page].path.read_text("utf-8").partition("<article")[2]
        before = re.split(r"<table|<div class=\"highlight", html)[0]
        assert len(re.sub(r"<[^>]+>", "", before).split()) < 100, page


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_stands_on_one_page_of_the_reference_with_all_that_belongs_to_it(site, name):
    pages = [page for path, page in site.pages.items() if path.startswith("api/") and name in page.said]
    assert len(pages) == 1
    missing = [wanted for wanted in [name, *members(name)] if not pages[0].said.get(wanted)]
    assert missing == [], "no anchor, or no words below it"


def test_the_first_page_of_the_reference_names_each_in_a_line(site):
    listed = site.text("api/index.html")
    errors = {name for name in PUBLIC if isinstance(at(name), type) and issubclass(at(name), BaseException)}
    lost = [name for name in PUBLIC if name not in errors and f"{name.removeprefix('jointcut.')}: " not in listed]
    assert lost == []


def at(name):
    module, _, own = name.rpartition(".")
    return getattr(import_module(module), own)


def test_the_site_has_a_page_for_each_task_and_none_for_each_file(site):
    written = [path for path in site.pages if not path.startswith("_modules/")]
    assert len(written) <= 60
    assert len([path for path in written if path.startswith("api/")]) <= 20


def test_every_file_stands_in_the_order_of_reading_with_its_sentence(site):
    house, listed = house_at(ROOT), site.text("order-of-reading.html")
    files = [name for name in house.order if not name.removeprefix("jointcut.").isalpha()]
    lines = {name: f"{name.split('.', 2)[2]}: {house.modules[name].sentence}" for name in files}
    assert [name for name, line in lines.items() if plain(line) not in listed] == []


def plain(sentence: str) -> str:
    """A sentence as the site prints it: without backticks, and with the quotes of a typesetter."""
    return sentence.replace("`", "").replace("'", "’")


def test_the_help_of_every_command_stands_in_the_site_as_it_is_printed(site):
    shown = site.text("command-line.html")
    for context, command in commands(main, None, "jointcut"):
        assert " ".join(command.get_help(context).split()) in shown


def commands(command, parent, name):
    context = command.make_context(name, ["--help"], parent, resilient_parsing=True)
    yield context, command
    for inner in command.list_commands(context) if isinstance(command, click.Group) else ():
        yield from commands(command.get_command(context, inner), context, inner)


def test_every_error_stands_on_the_page_of_errors(site):
    errors = import_module("jointcut.partition.errors")
    names = [
        name for name, item in vars(errors).items() if isinstance(item, type) and item.__module__ == errors.__name__
    ]
    said = site.pages["api/errors.html"].said
    wholes = {name.rpartition(".")[2]: words for name, words in said.items()}
    assert [name for name in names if not wholes.get(name)] == []


# ---------------------------------------------------------------------------------------------- how it hangs together


def test_every_link_within_the_site_leads_somewhere(site):
    assert [complaint for name, page in site.pages.items() for complaint in broken(site, name, page)] == []


def broken(site, name, page):
    for _, link in page.links:
        path, fragment = urldefrag(link)
        if urlsplit(link).scheme:
            continue
        target = normpath((Path(name).parent / unquote(urlsplit(path).path)).as_posix()) if path else name
        if not (site.folder / target).is_file():
            yield f"{name}: {link} is no file"
        elif fragment and target in site.pages and unquote(fragment) not in site.pages[target].anchors:
            yield f"{name}: {link} has no such place"


def test_a_name_in_a_docstring_is_a_link_to_what_it_names(site):
    links = {link for _, link in site.pages["api/differentiate.html"].links}
    assert "errors.html#jointcut.partition.errors.CallError" in links  # of another folder
    assert "#jointcut.aot.Function.vjp" in links  # a method, by the name of its class
    assert "search.html#jointcut.partition.CostModel" in links  # in a signature


def test_the_site_asks_nothing_of_a_network(site):
    asked = [
        (name, link) for name, page in site.pages.items() for tag, link in page.links if tag != "a" and is_far(link)
    ]
    sheets = {path.name: path.read_text("utf-8") for path in site.folder.rglob("*.css")}
    assert asked == []
    assert [name for name, text in sheets.items() if re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", text)] == []


def is_far(link):
    return urlsplit(link).netloc != ""


#: Pages of each kind: doors, a guide with code and a table that are wide, the reference.
LOOKED_AT = ("index.html", "largest-batch.html", "from-checkpoint.html", "api/target.html")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_keyboard_and_a_screen_reader_reach_all_of_a_page(site, browser, theme):
    tab = browser.taken(1400, 1000, theme, "reduce")
    found = {}
    for name in LOOKED_AT:
        tab.goto((site.folder / name).as_uri())
        found[name] = axe_findings(tab)
    browser.leave(tab)
    assert found == {name: [] for name in LOOKED_AT}


def test_no_page_tells_of_the_machine_that_built_it(site):
    libraries, made = sysconfig.get_path("purelib"), f"{tempfile.gettempdir()}/{tempfile.gettempprefix()}"
    told = [f"{ROOT}/", f"{Path.home()}/", libraries, str(site.folder), made]
    address = re.compile(r" at 0x[0-9a-f]{6,}")
    for path in sorted(site.folder.rglob("*.html")) + sorted(site.folder.rglob("*.js")):
        text = path.read_text("utf-8")
        assert [place for place in told if place in text] == [], path.name
        assert not address.search(text), path.name


def test_the_examples_in_the_builder_run(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    attempted = 0
    for name in ("docstrings", "included", "pages", "reachable"):
        found = doctest.testmod(import_module(name))
        assert found.failed == 0
        attempted += found.attempted
    assert attempted > 0

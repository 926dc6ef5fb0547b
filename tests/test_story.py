"""The three layout rules hold: one arrow of folders, one reading order of files, one door to JAX's insides.

So do the caps on length, and docstrings and types everywhere. `house.py` holds the rules; here they run on
the sources, and then on small houses with one planted fault each, so that a rule gone blind is seen.
"""

import re
from inspect import cleandoc
from pathlib import Path

import pytest

import house
from house import RULES, House, house_at

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def ours():
    """The sources, of which each is parsed once for all rules."""
    return house_at(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_sources_keep_the_rule(rule, ours):
    complaints = list(rule(ours))
    assert not complaints, "\n".join(["", *complaints])


def test_derivatives_know_of_the_engine_its_errors_and_one_product(ours):
    """So they could be a distribution of their own."""
    inside = [source for source in ours.sources if source.path.startswith("aot/derivatives/")]
    names = {item.name for source in inside for item in source.imports if item.name.startswith("jointcut.")}
    assert {name for name in names if not name.startswith("jointcut.aot.derivatives")} == {
        "jointcut.partition.errors.CallError",
        "jointcut.partition.errors.choices",
        "jointcut.partition.errors.message",
        "jointcut.partition.rewrite.product.Product",
        "jointcut.partition.rewrite.product.along",
    }


def test_every_file_of_tests_that_ci_names_is_there():
    words = re.findall(r"tests/\S*\.py", (ROOT / ".ci/run").read_text())
    paths = [head + name + tail for word in words for head, names, tail in [_braces(word)] for name in names.split(",")]
    assert len(paths) > 20 and [path for path in paths if not (ROOT / path).is_file()] == []


def _braces(word):
    """`a_{b,c}.py` as `a_`, `b,c` and `.py`."""
    head, _, rest = word.partition("{")
    names, _, tail = rest.partition("}")
    return head, names, tail


# ---------------------------------------------------------------- the rules can fail

GOOD = {
    "partition/__init__.py": '''
        """Cut.

        Files, in reading order:

            graph: Hold the program.
            program: Borrow from JAX.
        """
        from jointcut.partition.graph import Graph
    ''',
    "partition/program/__init__.py": '''
        """Borrow from JAX.

        Files, in reading order:

            jax: Borrow from JAX here.
        """
    ''',
    "partition/graph.py": '''
        """Hold the program.

        As ops.
        """
        class Graph:
            """Ops."""
            def _size(self) -> int: return 0
    ''',
    "partition/program/jax/__init__.py": '''
        """Borrow from JAX here.

        Files, in reading order:

            jaxprs: Read jaxprs.
        """
    ''',
    "partition/program/jax/jaxprs.py": '''
        """Read jaxprs."""
        import jax
        from jax._src import core
        from jointcut.partition.graph import Graph
        NEW = jax.__version__
    ''',
    "wrappers/__init__.py": '''
        """Wrap.

        Files, in reading order:

            tree: Flatten.
        """
    ''',
    "wrappers/tree.py": '"""Flatten."""',
    "aot/__init__.py": '''
        """Compile.

        Files, in reading order:

            tapes: Record.
            joint: Trace.
        """
    ''',
    "aot/tapes/__init__.py": '''
        """Record.

        Files, in reading order:

            reel: Wind.
        """
    ''',
    "aot/tapes/reel.py": '"""Wind."""',
    "aot/joint.py": '''
        """Trace."""
        import jax.numpy as jnp
        from jointcut import wrappers
        from jointcut.aot.tapes.reel import x
        name: str = jnp.zeros.__name__
    ''',
}
FULL_ROOM = '"""Record.\n\n' + "".join(f"    f{i}: Do.\n" for i in range(house.MOST_ENTRIES + 1)) + '"""'
LONG_FUNCTION = "def f() -> None:\n    'doc'\n" + "    a = 1\n" * house.MOST_FUNCTION_LINES


def planted(root: Path, changes: dict[str, str | None]) -> House:
    """Write the good house below `root` with some files changed, added, or (None) left out."""
    for path, text in (GOOD | changes).items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(cleandoc(text))
    return house_at(root)


def test_a_good_house_draws_no_complaint(tmp_path, monkeypatch):
    monkeypatch.setattr(house, "EXCUSED", {})
    good = planted(tmp_path, {})
    assert [complaint for rule in RULES for complaint in rule(good)] == []


def test_a_subfolder_is_read_where_its_parent_lists_it(tmp_path):
    order = [name.removeprefix("jointcut.") for name in planted(tmp_path, {}).order]
    assert order[-4:] == ["aot.tapes.reel", "aot.tapes", "aot.joint", "aot"]


FAULTS = {
    "folders_follow_the_arrow": [
        ("partition/graph.py", "import jointcut.aot.joint", "imports jointcut.aot.joint"),
        ("wrappers/tree.py", "from jointcut import aot", "imports jointcut.aot"),
    ],
    "own_imports_are_absolute": [
        ("aot/joint.py", "from .tapes import reel", "like jointcut.tapes.reel"),
        ("aot/joint.py", "import partition", "like jointcut.partition"),
    ],
    "own_imports_stand_at_the_top": [
        ("aot/joint.py", "def f(): import jointcut.wrappers", "inside a function"),
    ],
    "files_import_only_from_above": [
        ("partition/graph.py", "import jointcut.partition.program.jax.jaxprs", "not above it"),
        ("partition/graph.py", "from jointcut import partition", "not above it"),
        ("aot/tapes/reel.py", "import jointcut.aot.joint", "not above it"),
    ],
    "only_the_door_opens_jax": [
        ("aot/joint.py", "from jax._src import core", "reaches jax._src.core"),
        ("aot/joint.py", "from jax.extend import core as c", "reaches jax.extend.core"),
        ("aot/joint.py", "import jax.interpreters.ad", "reaches jax.interpreters.ad"),
        ("aot/joint.py", "import jax as j\nj.__version__", "reaches jax.__version__"),
        ("aot/joint.py", "import jax\njax.extend.core", "reaches jax.extend"),
    ],
    "files_are_short": [("aot/joint.py", "a = 1\n" * house.MOST_FILE_LINES, "401 lines, at most 400")],
    "functions_are_short": [("aot/joint.py", LONG_FUNCTION, "f has 41 lines")],
    "public_names_have_docstrings": [
        ("aot/joint.py", "class A:\n  'A.'\n  def b(self): ...", "A.b has no docstring"),
    ],
    "everything_is_typed": [
        ("aot/joint.py", "def f(a, *b, c: int = 0): ...", "f leaves a, b, the return untyped"),
        ("aot/joint.py", "class A:\n  def f(self, b) -> int: ...", "f leaves b untyped"),
    ],
}


@pytest.mark.parametrize(
    ("rule", "path", "code", "complaint"),
    [(rule, *fault) for rule, faults in FAULTS.items() for fault in faults],
)
def test_a_planted_fault_is_found(tmp_path, rule, path, code, complaint):
    opening = cleandoc(GOOD[path]).partition("\n")[0].strip('"')
    found = list(getattr(house, rule)(planted(tmp_path, {path: f'"""{opening}"""\n{code}'})))
    assert found and found[0].startswith(path) and complaint in found[0]


FALSEHOODS = {
    "every_file_is_listed": [
        ("aot/b.py", '"""More."""', "add the line `    b: More.` to the docstring of aot/__init__.py"),
        (
            "aot/b/__init__.py",
            '"""More."""',
            "add the line `    b: More.` to the docstring of aot/__init__.py",
        ),
        ("wrappers/__init__.py", None, "wrappers/__init__.py: missing"),
    ],
    "rooms_are_small": [("aot/tapes/__init__.py", FULL_ROOM, "lists 15 entries, at most 14")],
    "every_listed_file_exists": [("aot/joint.py", None, "lists joint, which is not there")],
    "the_list_quotes_first_lines": [
        ("aot/joint.py", '"""All."""', "lists joint as 'Trace.', but aot/joint.py opens with 'All.'"),
    ],
    "public_names_have_docstrings": [
        ("aot/joint.py", '"""trace"""', "opens with 'trace'; open with a sentence"),
        ("aot/joint.py", "import jax", "opens with ''; open with a sentence"),
    ],
}


@pytest.mark.parametrize(
    ("rule", "path", "text", "complaint"),
    [(rule, *falsehood) for rule, falsehoods in FALSEHOODS.items() for falsehood in falsehoods],
)
def test_a_list_that_is_not_true_is_found(tmp_path, rule, path, text, complaint):
    assert complaint in next(getattr(house, rule)(planted(tmp_path, {path: text})))


def test_every_rule_has_a_planted_fault():
    assert {rule.__name__ for rule in RULES} - FAULTS.keys() - FALSEHOODS.keys() == {"excuses_are_needed"}


def test_an_excuse_holds_while_it_is_needed(tmp_path, monkeypatch):
    excuses = {"aot/joint.py:f": "a table, read as one", "aot/joint.py": "not long at all"}
    monkeypatch.setattr(house, "EXCUSED", excuses)
    excused = planted(tmp_path, {"aot/joint.py": f'"""Trace."""\n{LONG_FUNCTION}'})
    assert list(house.functions_are_short(excused)) == []
    assert list(house.excuses_are_needed(excused)) == [
        "EXCUSED names aot/joint.py, which needs no excuse; take out the line"
    ]

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""What a fingerprint sees and what it does not."""

import pytest

from lightning_replay.compat.fingerprint import fingerprint, parse_function, wrappers

PLAIN = """
def step(self, closure=None, *, scale=1.0):
    total = f"{scale!r:>4}" + "text"
    if closure is None:
        return total
    return closure(*self.items, **self.options)[1:2]
"""


def of(source):
    return fingerprint([parse_function(source.lstrip("\n"))])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("    total", '    """Says what it does."""\n    total', id="docstring"),
        pytest.param("    total", "    # why\n\n    total", id="comment"),
        pytest.param("    total", "    pass\n    total", id="pass"),
        pytest.param("    total", "    later: int\n    total", id="bare annotation"),
        pytest.param("total = f", "total: str = f", id="annotated assignment"),
        pytest.param("closure=None", "closure: 'int | None' = None", id="argument"),
        pytest.param("scale=1.0):", "scale=1.0) -> dict[str, int]:", id="result"),
        pytest.param("\ndef", "\n@override\ndef", id="override"),
        pytest.param("\ndef", "\n@typing_extensions.override\ndef", id="dotted override"),
        pytest.param('"text"', "'text'", id="quotes"),
    ],
)
def test_wording_does_not_count(old, new):
    assert old in PLAIN
    assert of(PLAIN.replace(old, new)) == of(PLAIN)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("step", "other"),
        ("scale=1.0", "scale=2.0"),
        ("scale=1.0", "scale=True"),
        ("*, ", ""),
        ("is None", "is not None"),
        ("return total", "total"),
        ("[1:2]", "[1:3]"),
        ("!r", ""),
        ("\ndef", "\n@torch.no_grad()\ndef"),
        ("**self.options", ""),
    ],
)
def test_behaviour_counts(old, new):
    assert old in PLAIN
    assert of(PLAIN.replace(old, new)) != of(PLAIN)


def test_the_value_is_the_same_everywhere():
    # CPython 3.10, 3.11, 3.12 and 3.13 gave this value.
    assert of(PLAIN) == "8e889c516728"


def test_an_indented_method_keeps_its_strings():
    indented = 'def f():\n    return """a\nb"""\n'
    method = '    def f():\n        return """a\nb"""\n'
    assert of(indented) == of(method)


@pytest.mark.parametrize("source", ["f = lambda: 1\n", "class A: ...\n", "def f(:\n"])
def test_what_is_no_function_is_refused(source):
    with pytest.raises(SyntaxError):
        parse_function(source)


def test_only_decorators_that_wrap_are_counted():
    source = "@property\n@override\n@torch.enable_grad()\n@contextmanager\n@x.setter\ndef f(): ...\n"
    assert wrappers(parse_function(source)) == 2

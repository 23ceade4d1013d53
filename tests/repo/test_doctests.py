"""Every public name has an example that runs; public functions document their arguments and results."""

import doctest
import importlib
import inspect

import pytest
import torch

import isobit

# Rooms whose docstrings are not finished yet; shrink this list, and those of ruff's D rules in pyproject.toml.
UNFINISHED = ()
NAMESPACES = (
    "isobit",
    "isobit.bits",
    "isobit.certifying",
    "isobit.guards",
    "isobit.nn",
    "isobit.optim",
    "isobit.order",
    "isobit.parts",
    "isobit.profiling",
    "isobit.reveal",
    "isobit.reveal.targets",
    "isobit.rollout",
    "isobit.calibration",
    "isobit.sampling",
    "isobit.simulator",
)


def public_objects():
    """dotted name -> function or class, of every namespace."""
    for namespace in NAMESPACES:
        module = importlib.import_module(namespace)
        for name in module.__all__:
            made = getattr(module, name)
            room = getattr(made, "__module__", "").partition("isobit.")[2].partition(".")[0]
            is_error = inspect.isclass(made) and issubclass(made, Exception)
            is_public = inspect.isfunction(made) or inspect.isclass(made)
            if is_public and not is_error and room not in UNFINISHED:
                yield f"{namespace}.{name}", made


PUBLIC = dict(public_objects())


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name):
    torch.manual_seed(0)
    text = inspect.getdoc(PUBLIC[name]) or ""
    names = {"torch": torch, "isobit": isobit}
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert test.examples, f"{name} has no example"
    failures = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed
    assert not failures, f"the example of {name} prints something else; see the captured output"


@pytest.mark.parametrize("name", [n for n, made in PUBLIC.items() if inspect.isfunction(made)])
def test_functions_document_arguments_and_results(name):
    text = inspect.getdoc(PUBLIC[name])
    assert "\nReturns:\n" in text, name
    section = text.partition("\nArgs:\n")[2].partition("\n\n")[0].replace("*", "")
    for parameter in inspect.signature(PUBLIC[name]).parameters:
        assert f"    {parameter}: " in section, f"{name}: {parameter}"


def test_there_are_many():
    assert len(PUBLIC) > 30


def test_a_wrong_example_fails():
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed == 1

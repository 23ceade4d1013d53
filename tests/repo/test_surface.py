"""The public surface: `isobit/__init__.pyi` is the one list of names, and a change of it is a change of the product."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import isobit
from isobit.ops.dispatch import constant_in_graphs

# Every package with a stub, except one that only commands import, and two whose packages are not installed.
LEFT_OUT = {"isobit.comparing.dumps", "isobit.integrations.lightning", "isobit.integrations.trl"}
SOURCE = Path(isobit.__file__).parents[1]
STUBS = [path.parent.relative_to(SOURCE) for path in SOURCE.glob("isobit/**/__init__.pyi")]
PACKAGES = sorted({".".join(path.parts) for path in STUBS} - LEFT_OUT)
MODULES = ["isobit.optim", "isobit.bits", "isobit.parallel.checkpoint"]


@pytest.mark.parametrize("name", PACKAGES)
def test_every_name_of_a_stub_is_there(name):
    package = sys.modules.get(name) or __import__(name, fromlist=["HOMES"])
    assert package.__all__ == sorted(package.HOMES)
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, public) is not None for public in package.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_modules_show_only_public_names(name):
    module = __import__(name, fromlist=["__all__"])
    assert dir(module) == module.__all__ == sorted(module.__all__)
    assert all(getattr(module, public).__module__ == name for public in module.__all__)


def test_importing_isobit_imports_no_torch():
    code = "import sys, isobit; assert 'torch' not in sys.modules; isobit.linear; assert 'torch' in sys.modules"
    code += "; assert 'torch._dynamo' not in sys.modules"  # torch.compile takes as long to import as torch
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pytest_loads_nothing_of_isobit_for_people_who_do_not_ask_for_it():
    """Pytest imports the plugin in every test run of everybody who has isobit installed."""
    code = "import sys, pytest; before = set(sys.modules); import isobit.pytest_plugin"
    code += "; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [
        "isobit",
        "isobit.foundation",
        "isobit.foundation.lazy",
        "isobit.pytest_plugin",
    ]


def test_errors_name_the_function_of_every_package():
    for call, name in (
        (lambda: isobit.linear(torch.zeros(2, 3), torch.zeros(2, 4)), "isobit.linear"),
        (lambda: isobit.rollout.compare(3, 4), "isobit.rollout.compare"),
        (
            lambda: isobit.sampling.sample(torch.zeros(2, 2, 2), seed=0, requests=0, positions=0),
            "isobit.sampling.sample",
        ),
    ):
        with pytest.raises(isobit.IsobitError) as error:
            call()
        assert str(error.value).startswith(f"{name}: expected"), str(error.value)


def test_constants_of_graphs_are_marked_as_torch_marks_them():
    marked = constant_in_graphs(lambda: 1)
    assert vars(marked) == vars(torch.compiler.assume_constant_result(lambda: 1)) != {}


def test_signatures():
    assert str(inspect.signature(isobit.linear)) == (
        "(x: 'Tensor', weight: 'Tensor', bias: 'Tensor | None' = None, *, "
        "samples: 'Samples | Tensor | None' = None) -> 'Tensor'"
    )
    assert str(inspect.signature(isobit.freeze)) == "(module: 'torch.nn.Module') -> 'Frozen'"
    assert isobit.attention.__kwdefaults__ == {
        "scale": None,
        "window": None,
        "softcap": None,
        "chunk_size": None,
        "q_samples": None,
        "k_samples": None,
    }
    padded = ["lengths", "width", "side", "first", "total"]
    assert list(inspect.signature(isobit.Samples.padded).parameters) == padded


def test_every_error_is_an_isobit_error_with_three_parts():
    for name in isobit.__all__:
        error = getattr(isobit, name)
        if inspect.isclass(error) and issubclass(error, Exception):
            assert issubclass(error, isobit.IsobitError)
            shown = str(error(expected="a", received="b", remedy="c"))
            assert shown == "expected a\n  received: b\n  remedy: c"


def public_callables():
    """Every function and class of the public packages, and the public methods of these classes."""
    for name in PACKAGES:
        package = __import__(name, fromlist=["HOMES"])
        for public in package.__all__:
            found = getattr(package, public)
            if callable(found):
                yield f"{name}.{public}", found
            if inspect.isclass(found):
                for method, member in inspect.getmembers(found, callable):
                    if not method.startswith("_"):
                        yield f"{name}.{public}.{method}", member


def test_no_public_parameter_is_called_of():
    """`of` of a global batch says nothing in a signature; its number of samples is `total`."""
    seen = 0
    for name, function in public_callables():
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:  # a builtin without one
            continue
        seen += 1
        # A record that isobit makes: so many of `of` differ; its fields are keys of JSON.
        assert "of" not in parameters or name == "isobit.rollout.Finding", name
    assert seen > 150


def test_old_names_work_for_one_release_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"isobit\.reveal\.certify is now .*compare_orders"):
        assert isobit.reveal.certify is isobit.reveal.compare_orders
    with pytest.warns(DeprecationWarning, match="Certificate is now .*OrderComparison"):
        assert isobit.reveal.Certificate is isobit.reveal.OrderComparison
    assert not {"certify", "Certificate"} & {*dir(isobit.reveal), *isobit.reveal.__all__}
    with pytest.warns(DeprecationWarning, match="of= of Samples.packed is now total=") as seen:
        old = isobit.Samples.packed([3, 5], first=2, of=4)
    assert seen[0].filename == __file__  # the line to change
    assert old == isobit.Samples.packed([3, 5], first=2, total=4)
    with pytest.warns(DeprecationWarning, match="is now total="):
        assert isobit.Samples.padded([1, 2], width=2, of=2).total == 2
    with pytest.warns(DeprecationWarning, match="is now total="):
        assert isobit.Samples.cumulative([0, 1, 2], of=2).total == 2
    with pytest.warns(DeprecationWarning, match="of= of GlobalBatch"):
        batch = isobit.parallel.GlobalBatch(of=8, ranks=2)
    assert (
        batch == isobit.parallel.GlobalBatch(total=8, ranks=2) == isobit.parallel.GlobalBatch(8, 2)
    )
    for one in (old, batch, batch.share(0)):
        with pytest.warns(DeprecationWarning, match=r"\.of of \w+ is now \.total"):
            assert one.of == one.total
    with pytest.raises(TypeError, match="got total, and of, its old name"):
        isobit.Samples.packed([1], of=1, total=1)


@pytest.mark.filterwarnings("error")
def test_new_names_warn_of_nothing():
    share = isobit.parallel.GlobalBatch(total=8, ranks=2).share(1)
    assert isobit.Samples.packed([1] * 4, first=share.first, total=share.total).is_share
    assert isobit.reveal.compare_orders.__name__ == "compare_orders"

"""Help, the version and mistakes are answered without torch; the options name what the modules behind them know."""

import subprocess
import sys

import pytest

from isobit.cli import main

ASKED = """
import sys
from isobit.cli.main import COMMANDS, main
asked = [[], ["--help"], ["--version"], ["verfy"], ["reveal", "--htlm"], ["simulate", "x.py", "--ranks", "0"]]
for words in [*asked, *([*name.split(), "--help"] for name in COMMANDS)]:
    try:
        main(words)
    except SystemExit as stop:
        assert stop.code in (0, 2), words
    else:
        raise AssertionError(words)
    assert "torch" not in sys.modules, words
"""


def test_help_and_mistakes_do_not_wait_for_torch():
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_and_version_load_few_modules(word):
    """The seconds that a user waits are not measured here; what is loaded makes them."""
    code = f"import sys; from isobit.cli.main import main\ntry:\n    main(['{word}'])\nexcept SystemExit: pass\n"
    code += "print('loaded', *sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = done.stdout.rpartition("loaded ")[2].split()
    top = {name.partition(".")[0] for name in loaded}
    assert not top & {"torch", "numpy", "yaml", "rich", "blake3", "triton", "transformers"}
    assert [name for name in loaded if name.startswith("isobit")] == [
        "isobit",
        "isobit.cli",
        "isobit.cli.main",
        "isobit.cli.terminal",
        "isobit.errors",
        "isobit.foundation",
        "isobit.foundation.lazy",
        "isobit.foundation.plain_text",
        "isobit.foundation.trusted_folder",
    ]
    assert len(loaded) < 200


def test_options_name_what_is_there():
    from isobit.cli import reveal
    from isobit.cli.gate import model, training
    from isobit.gates.model.models import MODELS
    from isobit.gates.training.launcher import TRANSPORTS
    from isobit.gates.training.workload import DTYPES, WORKLOADS
    from isobit.ops.linear.targets import TARGETS

    assert tuple(MODELS) == model.MODELS
    assert tuple(sorted(WORKLOADS)) == training.WORKLOADS
    assert tuple(sorted(DTYPES)) == training.DTYPES
    assert training.TRANSPORTS == TRANSPORTS
    assert tuple(reveal.stock_targets()) == reveal.STOCK
    assert tuple(TARGETS) == reveal.OURS


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (["reveal", "sum", "--dtype", "bfloat16"], "bf16"),
        (["reveal", "sum", "--dtype", "bf16"], "bf16"),
        (["gate", "model", "--dtype", "bf16"], "bfloat16"),
        (["gate", "model", "--dtype", "float32"], "float32"),
        (["gate", "training", "--dtype", "fp32", "bfloat16"], ["float32", "bfloat16"]),
    ],
)
def test_dtypes_have_two_names(words, dtype):
    assert main.parse(words).dtype == dtype


def test_a_dtype_that_is_not_there_is_refused_with_the_names(capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main(["gate", "model", "--dtype", "fp16"])
    assert stopped.value.code == 2
    assert (
        "expected one of fp32 (float32), bf16 (bfloat16); received 'fp16'"
        in capsys.readouterr().err
    )


def test_the_module_behind_the_command_does_not_pass_for_it():
    """`python -m isobit.cli.main` imports with the current folder on the path."""
    done = subprocess.run(
        [sys.executable, "-m", "isobit.cli.main", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "python -m isobit" in done.stderr

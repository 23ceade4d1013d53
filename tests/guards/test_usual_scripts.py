"""The usual scripts, as users have them, with `.cuda()` and nccl: right ones are clean, each planted fault has one row.

Each is run as one process and on two simulated ranks. `python -m benchmarks usual_scripts` prints the table.
"""

import pytest

from isobit.guards.trial_run.ranks import preflight_ranks
from tests.guards.usual_faults import FAULTS, NEEDS, SCRIPTS
from tests.sweeps import mostly_full

QUICK = ("ddp_loop", "fsdp2_loop", "accelerate_loop")
CASES = {
    f"{fault.script}: {fault.name}: {ranks}": (fault, ranks)
    for fault in FAULTS
    for ranks in fault.ranks
}
QUICK_CASES = [
    name for name, (fault, ranks) in CASES.items() if fault.script == "ddp_loop" and ranks == 2
]
pytestmark = [
    pytest.mark.usefixtures("no_vllm"),
    pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning"),
]


def need(script):
    if script in NEEDS:
        pytest.importorskip(NEEDS[script], reason=f"pip install -c constraints.txt {NEEDS[script]}")


def test_there_are_ten_faults():
    assert len({fault.name for fault in FAULTS}) >= 10


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "script", mostly_full([p.stem for p in sorted(SCRIPTS.glob("*.py"))], QUICK)
)
def test_right_scripts_are_clean(script, ranks):
    need(script)
    report = preflight_ranks(SCRIPTS / f"{script}.py", ranks=ranks)
    assert report.findings == ()
    assert (report.steps, report.models, report.ranks) == (3, 1, ranks)


@pytest.mark.parametrize("name", mostly_full(CASES, QUICK_CASES))
@pytest.mark.sweep(4)
def test_a_planted_fault_has_one_row(tmp_path, name):
    fault, ranks = CASES[name]
    need(fault.script)
    script = tmp_path / f"{fault.script}.py"
    script.write_text(fault.plant())
    report = preflight_ranks(script, ranks=ranks, steps=fault.steps, config=fault.config)
    assert [finding.rule for finding in report.findings] == [fault.rule], report.findings

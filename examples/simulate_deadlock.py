"""Run 64 ranks of a script that hangs, in one process; the simulator reports which rank, where and why."""

from pathlib import Path

from isobit.errors import DeadlockError
from isobit.simulator import run_script

script = Path(__file__).parent / "bugs" / "logging_deadlock.py"
try:
    run_script(script, ranks=64)
except DeadlockError as error:
    print("culprits:", error.ranks)
    print("expected:", error.expected)
    print("received:", error.received)
    for rank, stack in error.stacks.items():
        print(f"rank {rank} is at", *stack)

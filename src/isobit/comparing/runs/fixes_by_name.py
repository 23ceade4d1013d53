"""Names of the suspects that a run can fix, and the variables that fix them; see fixes.py."""

from __future__ import annotations

SEED, HASH, TIME, THREADS = "seed", "hash", "time", "threads"
FILES = "files"  # nothing to fix: runs after the second find the same files
VARIABLES = {
    HASH: {"PYTHONHASHSEED": "0"},
    THREADS: {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}
IN_WORDS = {
    SEED: "every random number generator seeded",
    HASH: "PYTHONHASHSEED=0",
    TIME: "clocks, process numbers and drawn identities fixed",
    THREADS: "one thread",
    FILES: "these files there from the start",
}

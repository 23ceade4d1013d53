"""Fix one suspect in a run of the script: seeds, the clock, or threads. The order of hashes is fixed by a variable.

Two runs that differ, and are equal with a suspect fixed, show that it is the cause. A fix changes what the script sees,
so a run with fixes is compared only with another run with the same fixes.
"""

from __future__ import annotations

import datetime
import itertools
import os
import random
import time
import uuid
from typing import Any

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


START = 1_700_000_000.0  # seconds since the epoch
TICK = 0.001  # seconds that a fixed clock adds at each reading


def apply(fix: str) -> None:
    """Fix one suspect in this process."""
    {SEED: fix_seeds, TIME: fix_time, THREADS: fix_threads}.get(fix, lambda: None)()


def fix_seeds() -> None:
    """Seed every generator, and make seeding without a number repeatable."""
    import torch

    seed_random = random.seed

    class Seeded(random.Random):
        """A generator that is seeded with 0 if nobody gives a number."""

        def seed(self, a: Any = None, version: int = 2) -> None:
            super().seed(0 if a is None else a, version)

    random.Random = Seeded  # type: ignore[misc]
    random.seed = lambda a=None, version=2: seed_random(0 if a is None else a, version)
    random.seed()
    torch.manual_seed(0)
    torch.seed = torch.random.seed = lambda: torch.manual_seed(0).initial_seed()
    try:
        import numpy
    except ImportError:
        return
    numpy_seed = numpy.random.seed
    numpy.random.seed = lambda seed=None: numpy_seed(0 if seed is None else seed)
    numpy.random.seed()
    numpy.random.bit_generator.randbits = lambda bits: 0  # type: ignore[attr-defined]


def fix_time() -> None:
    """Let every clock start at one time and tick by a fixed amount; fix process numbers and drawn identities too."""
    ticks = itertools.count(1)

    def now() -> float:
        return START + TICK * next(ticks)

    class Clock(datetime.datetime):
        """A date whose current time is that of the fixed clock."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return cls.fromtimestamp(now(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.fromtimestamp(now(), datetime.timezone.utc).replace(tzinfo=None)

    bytes_drawn = random.Random(0)
    time.time = time.perf_counter = now
    time.time_ns = time.perf_counter_ns = lambda: int(now() * 1e9)
    datetime.datetime = Clock  # type: ignore[misc]
    os.getpid = lambda: 1
    os.urandom = lambda size: bytes_drawn.randbytes(size)
    uuid.uuid4 = lambda: uuid.UUID(bytes=bytes_drawn.randbytes(16), version=4)
    uuid.uuid1 = lambda node=None, clock_seq=None: uuid.uuid4()


def fix_threads() -> None:
    """Use one thread, whatever the script asks for."""
    import torch

    torch.set_num_threads(1)
    torch.set_num_threads = lambda nthreads: None

"""Build the kernels with a sanitizer into a folder, and run tests or programs on them.

    python packaging/sanitized_kernels.py address FOLDER -- -m pytest tests/ops
    python packaging/sanitized_kernels.py thread FOLDER -- program.py
    python packaging/sanitized_kernels.py address FOLDER --only delta_rule,experts -- -m pytest tests/ops

`address` is AddressSanitizer with UndefinedBehaviorSanitizer, `thread` is ThreadSanitizer. FOLDER gets the objects and
a copy of the package with the sanitized library; a second run compiles only what has changed. With `--only` these files
of csrc are instrumented, and the others are built as always, which is faster. The arguments after `--` are Python's.
Torch and Python are not instrumented, so their own memory is checked only where a kernel touches it. The exit code is
Python's: a sanitizer's first report ends the process with code 99.
"""

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Frames for the reports; less optimisation, which compiles faster. The bits are the same: no flag allows other ones.
READABLE = ["-O1", "-g1", "-fno-omit-frame-pointer"]
FLAGS = {
    # vptr needs type information of torch's classes that its library does not export.
    "address": [
        "-fsanitize=address,undefined",
        "-fno-sanitize=vptr",
        "-fno-sanitize-recover=undefined",
    ],
    # A resolver of clones runs before the library is relocated, and cannot call the sanitizer. The clones have one
    # result, so the first of them is enough.
    "thread": ["-fsanitize=thread", "-Dtarget_clones(...)=unused"],
}
RUNTIMES = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
OPTIONS = {
    # Python and torch keep memory until the process ends; that is no leak of the kernels.
    "ASAN_OPTIONS": "detect_leaks=0:exitcode=99:handle_segv=1:alloc_dealloc_mismatch=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
    "TSAN_OPTIONS": "exitcode=99:ignore_noninstrumented_modules=1",
}


def build(kind: str, folder: Path, only: set[str]) -> Path:
    """Compile csrc, or some of its files, with a sanitizer; return the folder to import isobit from."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    flags = [*setup["COMPILE"], *READABLE, *FLAGS[kind]]
    package = folder / kind / "isobit"
    unknown = only - {source.stem for source in setup["native_sources"]()[0]}
    if unknown:
        raise SystemExit(f"csrc has no {', '.join(sorted(unknown))}")
    compilation = setup["Compilation"](
        folder / kind / "objects", flags, [*setup["LINK"], *FLAGS[kind]]
    )
    if only:
        leave_others_plain(compilation, setup["Compilation"](), only)
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(
        ROOT / "src" / "isobit", package, ignore=shutil.ignore_patterns("__pycache__", "_native.*")
    )
    compilation.build(package / setup["LIBRARY"])
    return package.parent


def leave_others_plain(compilation: Any, plain: Any, only: set[str]) -> None:
    """Let a compilation take the objects of another one for all files but those of `only`."""

    def chosen(name: str) -> Callable[..., Any]:
        own, other = getattr(compilation, name), getattr(plain, name)
        return lambda source, *target: (own if source.stem in only else other)(source, *target)

    for name in ("object_of", "compile_one"):
        setattr(compilation, name, chosen(name))


def runtime_path(name: str) -> str:
    """Return where the compiler has a sanitizer's library."""
    found = subprocess.run(
        [os.environ.get("CXX", "g++"), f"-print-file-name={name}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"the compiler has no {name}: install its sanitizer libraries")
    return str(Path(found).resolve())


def main() -> int:
    """Build, and run what is asked for."""
    kind, folder, *words = sys.argv[1:]
    only: set[str] = set()
    if words[:1] == ["--only"] and len(words) > 1:
        only, words = set(words[1].split(",")), words[2:]
    if kind not in FLAGS or words[:1] not in ([], ["--"]):
        raise SystemExit(__doc__)
    path = build(kind, Path(folder).resolve(), only)
    if not words[1:]:
        return 0
    environment = {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": " ".join(map(runtime_path, RUNTIMES[kind])),
        "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)]),
    }
    return subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())

"""Build the kernels with a sanitizer into a folder, and run tests or programs on them.

    python packaging/sanitized_kernels.py address FOLDER -- -m pytest tests/ops
    python packaging/sanitized_kernels.py thread FOLDER -- program.py

`address` is AddressSanitizer with UndefinedBehaviorSanitizer, `thread` is ThreadSanitizer. FOLDER gets the objects and
a copy of the package with the sanitized library; a second run compiles only what has changed. The arguments after `--`
are Python's. Torch and Python are not instrumented, so their own memory is checked only where a kernel touches it. The
exit code is Python's: a sanitizer's first report ends the process with code 99.
"""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

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


def build(kind: str, folder: Path) -> Path:
    """Compile csrc with a sanitizer; return the folder to import isobit from."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    flags = [*setup["COMPILE"], *READABLE, *FLAGS[kind]]
    package = folder / kind / "isobit"
    compilation = setup["Compilation"](
        folder / kind / "objects", flags, [*setup["LINK"], *FLAGS[kind]]
    )
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(
        ROOT / "src" / "isobit", package, ignore=shutil.ignore_patterns("__pycache__", "_native.*")
    )
    compilation.build(package / setup["LIBRARY"])
    return package.parent


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
    if kind not in FLAGS or words[:1] not in ([], ["--"]):
        raise SystemExit(__doc__)
    path = build(kind, Path(folder).resolve())
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

"""Build the native kernels and the wheel around them.

The kernels are one shared library without a Python symbol, so `isobit/_native.so` serves every Python, and the wheel
is tagged py3-none. The library is kept with a stamp of what it was built from; while that is unchanged, no command
compiles again. Where compiling fails, the package installs without kernels, and `isobit doctor` gives the reason.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    raise SystemExit(
        "isobit: expected setuptools 77 or later\n  received: an older one\n"
        "  remedy: pip install --upgrade 'setuptools>=77' wheel"
    ) from None

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src" / "isobit"
LIBRARY, STAMP, REASON = "_native.so", "_native.json", "native_build_failure.txt"

# ISOBIT_PURE_PYTHON=1 builds a wheel without kernels for every platform, such as the ARM hosts of GH200 and GB200: GPUs
# have Triton's kernels, and the portable executor serves the CPU.
PURE = os.environ.get("ISOBIT_PURE_PYTHON", "") not in ("", "0")
PURE_REASON = "this wheel is pure Python: it was built with ISOBIT_PURE_PYTHON, for platforms without native kernels"

# Pinned: nothing of the build machine (-march=native) and nothing that reorders or fuses additions.
FLAGS = ["-O3", "-g0", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fno-fast-math", "-Wall"]
FLAGS += ["-fno-math-errno"]  # square roots are instructions, with the same bits; errno is not read
COMPILE = [*FLAGS, "-fPIC", "-fwrapv", "-DNDEBUG", f'-DISOBIT_FLAGS="{" ".join(FLAGS)}"']
# No OpenMP library is named: the symbols are then found in the one that torch has loaded, whatever its file is called.
LINK = ["-shared", "-Wl,--as-needed", "-lc10", "-ltorch_cpu"]
# CPU seconds for all files: 4:21 on two cores of a Xeon at 2.5 GHz with g++ 12, beside downloads. An estimate.
CORE_SECONDS = 520
SECONDS_PER_LINE = 60  # of progress, at most
# torch's headers, which most files include: half of the time is theirs, so they are compiled once for all of them. A
# compiler that cannot use the result reads the headers again; the objects have the same bytes.
COMMON = ("torch/library.h", "ATen/Parallel.h")
FEW = 4  # files, for which this is not worth its time
# Symbols of torch that need not be there when the library is loaded, by the file that uses them: gradients compiled for
# another torch are not registered (csrc/derivatives.cpp), and must not keep the kernels from loading.
WEAK = {"derivatives.cpp": ("_ZN*5torch8autograd*", "_ZT*N5torch8autograd*", "_ZN*5torch6dynamo*")}


def native_sources() -> tuple[list[Path], list[Path]]:
    """Return the C++ files and the headers, sorted."""
    return sorted((ROOT / "csrc").glob("*.cpp")), sorted((ROOT / "csrc").glob("*.h"))


def with_headers(source: Path) -> list[Path]:
    """Return a C++ file and the headers of csrc that it includes, also through others."""
    found = [source]
    for path in found:  # grows meanwhile
        names = re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
        found += [p for name in sorted(names) if (p := path.parent / name) not in found]
    return found


def hash_of(*parts: bytes) -> str:
    """Return the SHA-256 of several byte strings, each with its length."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.hexdigest()


def sources_digest() -> str:
    """Return the digest of csrc and the flags; shipped evidence is valid for kernels from these sources."""
    sources, headers = native_sources()
    files = [part for p in (*sources, *headers) for part in (p.name.encode(), p.read_bytes())]
    return hash_of(*files, json.dumps([COMPILE, LINK, WEAK]).encode())


def inputs_digest() -> str:
    """Return the digest of what decides the library: csrc, the flags and torch's version."""
    return hash_of(sources_digest().encode(), importlib.metadata.version("torch").encode())


def find_torch() -> Path:
    """Return torch's folder, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed where isobit is built")
    return Path(spec.origin).parent


def find_compiler() -> tuple[str, str]:
    """Return the C++ compiler and its first line of `--version`."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise RuntimeError(f"no C++ compiler, as `{compiler}` is not found")
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    return compiler, done.stdout.splitlines()[0]


def minutes(seconds: float) -> str:
    """Return a time as 1:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def say(line: str) -> None:
    """Print a line of progress at once; pip shows it with -v."""
    print(f"isobit: {line}", flush=True)


class Compilation:
    """Compile the files that have no object yet, several at a time, and link them.

    An object is named by the digest of its source, the headers of csrc that it includes, the flags, the compiler and
    torch's version, and is kept in build/native, so that only what a change reaches is compiled.
    packaging/sanitized_kernels.py passes other flags and another folder.
    """

    def __init__(
        self,
        objects: Path = ROOT / "build" / "native",
        compile_flags: list[str] = COMPILE,
        link_flags: list[str] = LINK,
    ) -> None:
        self.compiler, self.version = find_compiler()
        self.torch = find_torch()
        self.objects, self.compile_flags, self.link_flags = objects, compile_flags, link_flags
        self.common: Path | None = None

    def object_of(self, source: Path) -> Path:
        """Return where the object of a source file is kept."""
        words = [*self.compile_flags, self.version, importlib.metadata.version("torch")]
        words += WEAK.get(source.name, ())
        contents = [p.read_bytes() for p in with_headers(source)]
        return self.objects / f"{source.stem}-{hash_of(*contents, *map(str.encode, words))[:16]}.o"

    def compile_one(self, source: Path, target: Path) -> None:
        """Compile one file; raise RuntimeError with the compiler's first error line where it fails."""
        text = "".join(p.read_text() for p in with_headers(source))
        common = self.common if all(f"<{name}>" in text for name in COMMON) else None
        unfinished = target.with_suffix(".part.o")
        self.run(
            self.words(),
            [] if common is None else ["-include", str(common)],
            ["-c", str(source.relative_to(ROOT)), "-o", str(unfinished)],
        )
        if source.name in WEAK:
            weak = [f"--weaken-symbol={name}" for name in WEAK[source.name]]
            subprocess.run(["objcopy", "--wildcard", *weak, str(unfinished)], check=True)
        unfinished.rename(target)

    def words(self) -> list[str]:
        """Return the options of every call of the compiler."""
        include = self.torch / "include"
        # Error messages hold file names: they must not be those of the build machine.
        maps = [f"-ffile-prefix-map={ROOT}/=", f"-ffile-prefix-map={self.torch.parent}/="]
        paths = [include, include / "torch" / "csrc" / "api" / "include"]
        return [*self.compile_flags, *maps, *(f"-isystem{p}" for p in paths)]

    def compile_common(self, folder: Path) -> None:
        """Compile the headers that most files include."""
        header = folder / "common.h"
        header.write_text("".join(f"#include <{name}>\n" for name in COMMON))
        self.run(self.words(), ["-x", "c++-header", str(header), "-o", f"{header}.gch"])
        self.common = header

    def run(self, *words: list[str]) -> None:
        """Run the compiler in the root folder."""
        command = [self.compiler, *(word for group in words for word in group)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.stderr:
            print(done.stderr, file=sys.stderr, flush=True)
        if done.returncode != 0:
            said = [line for line in done.stderr.splitlines() if "error" in line] or [""]
            raise RuntimeError(f"`{self.compiler}` failed: {said[0]}")

    def build(self, library: Path) -> None:
        """Compile what is missing, largest file first, and link the library."""
        sources, _ = native_sources()
        self.objects.mkdir(parents=True, exist_ok=True)
        targets = {source: self.object_of(source) for source in sources}
        missing = [source for source in sources if not targets[source].exists()]
        missing.sort(key=lambda p: -p.stat().st_size)
        jobs = int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count() or 1
        share = sum(p.stat().st_size for p in missing) / sum(p.stat().st_size for p in sources)
        expected = CORE_SECONDS * share / min(jobs, len(missing) or 1)
        say(
            f"compiling {len(missing)} of {len(sources)} files with {self.version}, {jobs} at a time; "
            f"this takes about {minutes(expected)} minutes where nothing else runs"
        )
        start = time.monotonic()
        with (
            tempfile.TemporaryDirectory(dir=self.objects) as folder,
            ThreadPoolExecutor(jobs) as pool,
        ):
            if len(missing) > FEW:
                self.compile_common(Path(folder))
            running = {pool.submit(self.compile_one, p, targets[p]): p for p in missing}
            self.follow(running, jobs, start)
        library.parent.mkdir(parents=True, exist_ok=True)
        objects = [str(targets[source]) for source in sources]
        self.run(objects, [f"-L{self.torch / 'lib'}", *self.link_flags, "-o", str(library)])
        say(f"linked {library.name} after {minutes(time.monotonic() - start)}")

    def follow(self, running: dict[Future[None], Path], jobs: int, start: float) -> None:
        """Print a line per finished file, and at least one a minute, with the time that is left."""
        sizes = [p.stat().st_size for p in running.values()]
        waiting, finished = set(running), 0
        while waiting:
            done, waiting = wait(waiting, SECONDS_PER_LINE, FIRST_COMPLETED)
            finished += sum(running[one].stat().st_size for one in done)
            count, elapsed = len(running) - len(waiting), time.monotonic() - start
            left = time_left(elapsed, finished, sizes[count : count + jobs], sum(sizes))
            for one in done:
                one.result()
            names = ", ".join(running[one].name for one in done) or "still compiling"
            later = f", about {minutes(left)} left" if waiting and finished else ""
            say(f"[{count}/{len(running)}] {names}, {minutes(elapsed)}{later}")


def time_left(elapsed: float, finished: int, under_way: list[int], total: int) -> float:
    """Estimate the seconds that are left from the bytes of the files that are finished.

    A file that is being compiled counts as half done.
    """
    compiled = finished + sum(under_way) / 2
    return elapsed * (total - compiled) / compiled


def is_current(folder: Path) -> bool:
    """Tell whether the library in a folder is the one that its stamp describes, built from the present inputs."""
    library, stamp = folder / LIBRARY, folder / STAMP
    if not library.exists() or not stamp.exists():
        return False
    known = json.loads(stamp.read_text())
    found = {"inputs": inputs_digest(), "library": hash_of(library.read_bytes())}
    return {key: known.get(key) for key in found} == found


def make_library(folder: Path) -> None:
    """Put the library and its stamp into a folder: what the source folder holds if current, else newly compiled."""
    for known in (folder, PACKAGE):
        if is_current(known):
            say(f"{LIBRARY} is current: nothing is compiled")
            if known != folder:
                folder.mkdir(parents=True, exist_ok=True)
                for name in (LIBRARY, STAMP):
                    shutil.copy2(known / name, folder / name)
            return
    compilation = Compilation()
    compilation.build(folder / LIBRARY)
    stamp = {
        "inputs": inputs_digest(),
        "sources": sources_digest(),
        "library": hash_of((folder / LIBRARY).read_bytes()),
        "torch": importlib.metadata.version("torch"),
        "compiler": compilation.version,
    }
    (folder / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")


class BuildKernels(build_ext):
    """Build the library, or write down why not: the portable executor serves then."""

    def run(self) -> None:
        # What is installed is the source folder (editable), or the folder that becomes the wheel.
        folder = PACKAGE if self.inplace else Path(self.build_lib).resolve() / "isobit"
        for place in (PACKAGE, folder):
            (place / REASON).unlink(missing_ok=True)
        try:
            make_library(folder)
        except Exception as error:
            folder.mkdir(parents=True, exist_ok=True)
            for name in (LIBRARY, STAMP):
                (folder / name).unlink(missing_ok=True)
            (folder / REASON).write_text(f"{error}; for the compiler's output: pip install -v .")
            say(f"native kernels were not built ({error}); the portable executor will serve")

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))


class FreshModules(build_py):
    """Collect the modules in an empty folder: a wheel must not hold files of an earlier build."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "isobit", ignore_errors=True)
        super().run()
        if PURE and not self.editable_mode:
            folder = Path(self.build_lib) / "isobit"
            for name in (LIBRARY, STAMP):
                (folder / name).unlink(missing_ok=True)
            (folder / REASON).write_text(PURE_REASON)


class AnyPython(bdist_wheel):
    """Tag the wheel for every Python 3 of this platform: the library calls nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def long_description() -> str:
    """Return README.md without pictures and links into the repository, which a package index cannot show."""
    picture = re.compile(r"^!\[[^\]]*\]\([^)]*\)\n+", re.MULTILINE)
    link = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)[^)\s]+\)")

    # Every second part is a block of code.
    parts = re.split(r"(^```.*?^```$)", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    return "".join(p if i % 2 else link.sub(r"\1", picture.sub("", p)) for i, p in enumerate(parts))


if __name__ == "__main__":  # packaging/sanitized_kernels.py reads this file for its functions
    sources, headers = native_sources()
    setup(
        long_description=long_description(),
        long_description_content_type="text/markdown",
        # Named here so that the source distribution holds the files.
        ext_modules=[]
        if PURE and "sdist" not in sys.argv
        else [
            Extension(
                "isobit._native",
                [str(p.relative_to(ROOT)) for p in sources],
                depends=[str(p.relative_to(ROOT)) for p in headers],
            )
        ],
        cmdclass={"build_py": FreshModules, "build_ext": BuildKernels, "bdist_wheel": AnyPython},
    )

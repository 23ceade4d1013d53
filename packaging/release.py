"""Make the files of a release, twice, and refuse to if the two differ.

Usage:
    python packaging/release.py [--folder dist/release] [--rehearse [--kernels FOLDER]]

Builds from `git archive` of the commit, in two folders, in a new venv with pinned tools: a wheel with kernels, a wheel
without, and the source distribution. Then installs the wheel where no compiler is found, runs the doctor and the status
of the shipped evidence, writes a list of components (SBOM, CycloneDX) of that environment and SHA256SUMS. Needs g++ 12
or later, the package registry, and about fifteen minutes on two cores. `--rehearse` does the same for a commit that is
not ready, whose evidence need not be signed. With `--kernels` a rehearsal takes `_native.so` and `_native.json` from a
folder and compiles nothing, so that it does not show that the compiler gives the same bytes twice.

Exit code 0: all files are written; 1: two builds differ, or a check failed; 2: the commit is not ready for a release.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"  # the oldest that isobit supports, as in pyproject.toml
START = time.monotonic()
# Read once: a commit that is made during the builds must not get into the second of them.
COMMIT = subprocess.run(
    ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.strip()


def say(line: str) -> None:
    """Print a line of progress with the seconds since the start."""
    print(f"release: {line}, {time.monotonic() - START:.0f} s", flush=True)


def run(*words: object, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command; return what it printed, or end with its last lines."""
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise SystemExit(f"release: {' '.join(map(str, words))} failed:\n{said}")
    return done.stdout


def find_version(root: Path = ROOT) -> str:
    """Return the version of the package, as its source says."""
    text = (root / "src/isobit/__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise SystemExit("release: src/isobit/__init__.py has no __version__")
    return found.group(1)


def faults_of(version: str, root: Path = ROOT) -> list[str]:
    """Return why the files of a checkout are not those of a release."""
    faults = []
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text():
        faults.append(f"CITATION.cff has another version than {version}")
    first = re.search(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if first is None or not re.fullmatch(
        re.escape(version) + r" \(\d{4}-\d\d-\d\d\)", first.group(1)
    ):
        faults.append(f"the first section of CHANGELOG.md is not `## {version} (YYYY-MM-DD)`")
    evidence = json.loads((root / "src/isobit/library/evidence.json").read_text())
    key = root / "docs/reference/keys" / f"isobit-{version}.pub"
    if "signature" not in evidence:
        faults.append("the shipped evidence is not signed: packaging/ship_evidence.py --sign KEY")
    if not key.exists():
        faults.append(f"there is no {key.relative_to(root)}")
    return faults


def check_commit(version: str, is_rehearsal: bool) -> None:
    """End with exit code 2 if the commit cannot be released; in a rehearsal, print why and go on."""
    faults = faults_of(version)
    if run("git", "status", "--porcelain", "--untracked-files=no"):
        faults.append("tracked files differ from the commit")
    if faults:
        print("release: not ready", *faults, sep="\n  ", file=sys.stderr)
        if not is_rehearsal:
            raise SystemExit(2)


def make_venv(folder: Path, *packages: str) -> Path:
    """Make a venv with packages as constraints.txt pins them; return its Python."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    install = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    run(*install, "-c", ROOT / "constraints.txt", *packages, env=environment())
    return python


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a build: nothing of the caller's Python, and the time of the commit."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    seconds = run("git", "log", "-1", "--format=%ct", COMMIT).strip()
    return {**clean, "SOURCE_DATE_EPOCH": seconds, **more}


def copy_kernels(kernels: Path, source: Path) -> None:
    """Put kernels that are already compiled into a checkout, or end if they are not of these sources."""
    for name in ("_native.so", "_native.json"):
        shutil.copy2(kernels / name, source / "src" / "isobit" / name)
    stamp = json.loads((kernels / "_native.json").read_text())
    say(f"kernels are not compiled: taken with library digest {stamp['library'][:12]}")


def build(python: Path, folder: Path, kernels: Path | None = None) -> dict[str, Path]:
    """Build the commit's files in a folder of its own; return them by name."""
    source = folder / "source"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(source, filter="data")
    if kernels is not None:
        copy_kernels(kernels, source)
    plain = environment()
    run("bash", "packaging/build_wheel", python, cwd=source, env=plain)
    shutil.rmtree(source / "build" / "lib", ignore_errors=True)
    pure = environment(ISOBIT_PURE_PYTHON="1")
    setup = (python, "-W", "ignore", "setup.py", "--quiet")
    run(*setup, "bdist_wheel", "--dist-dir", "dist", cwd=source, env=pure)
    run(*setup, "sdist", "--dist-dir", "dist", cwd=source, env=plain)
    for path in (source / "dist").glob("*.tar.gz"):
        make_plain(path, int(plain["SOURCE_DATE_EPOCH"]))
    return {path.name: path for path in sorted((source / "dist").iterdir())}


def make_plain(path: Path, seconds: int) -> None:
    """Write a packed folder again with sorted names and without times, owners and modes of this machine."""
    with tarfile.open(path) as packed:
        members = [
            (one, packed.extractfile(one) if one.isfile() else None) for one in packed.getmembers()
        ]
        parts = [(one, part.read() if part else b"") for one, part in members]
    contents = io.BytesIO()
    with tarfile.open(fileobj=contents, mode="w", format=tarfile.PAX_FORMAT) as plain:
        for one, data in sorted(parts, key=lambda pair: pair[0].name):
            fresh = tarfile.TarInfo(one.name)
            fresh.type, fresh.size, fresh.mtime = one.type, len(data), seconds
            fresh.mode = 0o755 if one.isdir() or one.mode & 0o100 else 0o644
            plain.addfile(fresh, io.BytesIO(data))
    path.write_bytes(gzip.compress(contents.getvalue(), mtime=seconds))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def try_wheel(folder: Path, files: Path, version: str, is_rehearsal: bool) -> Path:
    """Install the wheel where no compiler is found, and show the evidence in it; return that Python."""
    python = make_venv(folder / "fresh", TORCH)
    install = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    no_compiler = environment(CXX="no-such-compiler")
    # By name and not by file: the list of components must not hold a path of this machine.
    run(*install, "--find-links", files, "--only-binary", "isobit", f"isobit[sign]=={version}",
        env=no_compiler, cwd=folder)  # fmt: skip
    isobit = python.with_name("isobit")
    print(run(isobit, "doctor", env=no_compiler, cwd=folder))
    key = ROOT / "docs/reference/keys" / f"isobit-{version}.pub"
    words: tuple[str, ...] = ("contract", "status", "isobit")
    if not is_rehearsal:
        words = (*words, "--require-signature", str(key))
    status = subprocess.run(
        [str(word) for word in (isobit, *words)],
        cwd=folder, env=no_compiler, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(status.stdout)
    faults = faults_of_status(status.stdout, "" if is_rehearsal else key_digits(key))
    if status.returncode != 2:
        raise SystemExit(
            f"release: isobit contract status ended with {status.returncode}:\n{status.stderr}"
        )
    if faults:
        print("release: the evidence in the wheel is not that of a release", *faults, sep="\n  ")
        if not is_rehearsal:
            raise SystemExit(1)
    return python


def faults_of_status(printed: str, signer: str) -> list[str]:
    """Return why the evidence that `isobit contract status isobit` shows is not that of a release.

    All contracts must be shipped as kept, none as stale, and all signed by one key (an empty signer: by any or none).
    """
    words = " ".join(printed.split())
    contracts = re.search(r"(\d+) contracts: ", words)
    kept = re.search(r"shipped evidence: (\d+) of (\d+) kept", words)
    total = contracts.group(1) if contracts else "no"
    faults = []
    if kept is None or kept.groups() != (total, total):
        shown = f"{kept.group(1)} of {kept.group(2)}" if kept else "none"
        faults.append(f"shipped as kept: {shown}, of {total} contracts")
    if stale := re.search(r"shipped evidence is stale for \d+", words):
        faults.append(stale.group(0))
    if signer and f"signed by Ed25519 key {signer}" not in words:
        faults.append(f"it is not signed by Ed25519 key {signer}")
    return faults


def key_digits(path: Path) -> str:
    """Return an OpenSSH public key of Ed25519 in hexadecimal."""
    import base64

    return base64.b64decode(path.read_text().split()[1])[-32:].hex()


def list_components(tools: Path, python: Path, target: Path) -> None:
    """Write the list of components of an environment."""
    run(
        tools.with_name("cyclonedx-py"), "environment", python, "--pyproject", "pyproject.toml",
        *("--mc-type", "library", "--short-PURLs", "--output-reproducible", "-o", target),
        env=environment(),
    )  # fmt: skip


def main() -> int:
    """Build, compare, try and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "dist" / "release")
    parser.add_argument("--rehearse", action="store_true", help="the commit need not be ready")
    parser.add_argument(
        "--kernels", type=Path, metavar="FOLDER", help="with --rehearse: do not compile"
    )
    options = parser.parse_args()
    if options.kernels is not None and not options.rehearse:
        parser.error("--kernels is for a rehearsal: a release compiles its kernels twice")
    version = find_version()
    check_commit(version, options.rehearse)
    say(f"isobit {version} at {COMMIT}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("[1/5] a venv with torch and the tools of the build")
        python = make_venv(folder / "build", TORCH, "numpy", "setuptools", "wheel", "ninja")
        run(python, "-m", "pip", "--quiet", "install", "-c", ROOT / "constraints.txt",
            *("blake3", "pyyaml", "rich"), env=environment())  # fmt: skip
        builds = []
        for turn in ("first", "second"):
            say(f"[2/5] the {turn} build: minutes")
            # Folders of different lengths: a path that gets into a file is seen.
            builds.append(build(python, folder / f"the-{turn}-one", options.kernels))
        say("[3/5] digests")
        differing = []
        for file, path in builds[0].items():
            found = [digest(one[file]) if file in one else "absent" for one in builds]
            print(*sorted(set(found)), file, f"({path.stat().st_size:,} bytes)")
            if len(set(found)) > 1:
                differing.append(file)
        if differing:
            print(f"release: the two builds differ in {', '.join(differing)}", file=sys.stderr)
            return 1
        shutil.rmtree(options.folder, ignore_errors=True)
        options.folder.mkdir(parents=True)
        for file, path in builds[0].items():
            shutil.copy(path, options.folder / file)
        say("[4/5] the wheel in a fresh venv without a compiler")
        fresh = try_wheel(folder, options.folder.resolve(), version, options.rehearse)
        say("[5/5] list of components")
        tools = make_venv(folder / "tools", "cyclonedx-bom==7.5.0")
        list_components(tools, fresh, options.folder / f"isobit-{version}.cdx.json")
        sums = [f"{digest(path)}  {path.name}" for path in sorted(options.folder.iterdir())]
        (options.folder / "SHA256SUMS").write_text("\n".join(sums) + "\n")
        print("\n".join(sums))
    say(f"{len(sums)} files in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

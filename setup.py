"""Builds the native kernels; where that fails, the package installs without them and says why."""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
REASON = ROOT / "src" / "isobit" / "native_build_failure.txt"

# Pinned: nothing of the build machine (-march=native) and nothing that reorders or fuses additions.
FLAGS = ["-O3", "-g0", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fno-fast-math", "-Wall"]


class Build(BuildExtension):
    """Builds, or writes down why not: the portable executor serves then, and `isobit doctor` reads the reason."""

    def run(self) -> None:
        REASON.unlink(missing_ok=True)
        try:
            super().run()
        except Exception as error:
            REASON.write_text(f"{error}; for the compiler's words: pip install -v -e . --no-build-isolation")
            print(f"isobit: native kernels were not built ({error}); the portable executor will serve")


setup(
    ext_modules=[
        CppExtension(
            "isobit._native",
            [str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc").glob("*.cpp"))],
            depends=[str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc").glob("*.h"))],
            extra_compile_args=[*FLAGS, f'-DISOBIT_FLAGS="{" ".join(FLAGS)}"'],
            extra_link_args=["-fopenmp"],
        )
    ],
    cmdclass={"build_ext": Build},
)

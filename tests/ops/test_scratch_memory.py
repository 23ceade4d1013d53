"""The kernels' scratch memory ends where it says: a part beyond the total raises, and a part that fits does not.

In a build with AddressSanitizer, a write behind a part is reported, though the buffer goes on.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parent.parent.parent / "csrc"
COMPILER = os.environ.get("CXX", "g++")
PROGRAM = r"""
#include <cstdio>
#include "scratch.h"

int main(int, char** words) {
  const int64_t total = std::atol(words[1]), first = std::atol(words[2]), second = std::atol(words[3]);
  isobit::Scratch scratch;
  isobit::BumpAllocator memory(scratch, total);
  try {
    float* a = memory.allocate(first);
    char* b = memory.allocate<char>(second);
    if (words[4]) a[std::atol(words[4])] = 1.0f;
    std::printf("%d\n", int(reinterpret_cast<float*>(b) - a));
    return reinterpret_cast<uintptr_t>(b) % 64 ? 3 : 0;
  } catch (const std::length_error& error) {
    std::puts(error.what());
    return 1;
  }
}
"""


def compile_program(folder, *flags):
    if shutil.which(COMPILER) is None:
        pytest.skip("no C++ compiler")
    (folder / "main.cpp").write_text(PROGRAM)
    command = [COMPILER, "-std=c++20", "-Wall", "-Werror", f"-I{CSRC}", *flags]
    subprocess.run([*command, "main.cpp", "-o", "main"], cwd=folder, check=True)
    return folder / "main"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compile_program(tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize(
    ("total", "first", "second", "fits"),
    [
        (32, 16, 64, True),
        (32, 3, 1, True),  # each part is rounded up to a cache line
        (32, 17, 1, False),
        (31, 16, 64, False),
        (32, 16, 65, False),
        (16, 17, 0, False),
        (0, 0, 0, True),
    ],
)
def test_a_part_beyond_the_total_raises(program, total, first, second, fits):
    done = subprocess.run(
        [program, *map(str, (total, first, second))], capture_output=True, text=True, check=False
    )
    assert done.returncode == (0 if fits else 1)
    if fits:
        assert int(done.stdout) == (first + 15) // 16 * 16
    else:
        assert "expected scratch memory" in done.stdout
        assert "received: room for" in done.stdout


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    try:
        return compile_program(tmp_path_factory.mktemp("sanitized"), "-fsanitize=address")
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no AddressSanitizer")


@pytest.mark.parametrize(("place", "is_seen"), [(0, False), (99, False), (100, True), (112, True)])
def test_a_write_behind_a_part_is_reported(sanitized, place, is_seen):
    """A part of 100 floats, which ends inside a cache line, before one of 100 bytes."""
    done = subprocess.run(
        [sanitized, "1000", "100", "100", str(place)], capture_output=True, text=True, check=False
    )
    assert ("use-after-poison" in done.stderr) == is_seen, done.stderr
    assert (done.returncode != 0) == is_seen

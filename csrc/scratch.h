// Scratch memory of a thread, on huge pages where the system grants them. Includes nothing of
// torch: tests/ops/test_scratch_memory.py compiles it alone.
//
// A tile of a product touches one page per row. With 4 KiB pages, walking a virtual machine's
// nested page tables costs more time than merging the partial sums. Large buffers therefore ask the
// kernel for 2 MiB pages, as torch does when THP_MEM_ALLOC_ENABLE is set.
//
// A build with AddressSanitizer sees what lies outside of a part: memory that was not handed out is
// poisoned, and parts have a gap between them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace isobit {

constexpr uintptr_t huge_page = uintptr_t(1) << 21;

// Advises the kernel to back `data` (any memory, `bytes` long) by huge pages.
inline void prefer_huge_pages(void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + huge_page - 1) / huge_page * huge_page;
  const uintptr_t end = (address + bytes) / huge_page * huge_page;
  if (begin < end)
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a failure is harmless
#endif
}

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t gap_floats = 16, gap_count = 32;  // between the parts of a BumpAllocator
inline void poison(void* data, size_t bytes) { ASAN_POISON_MEMORY_REGION(data, bytes); }
inline void unpoison(void* data, size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(data, bytes); }
#else
constexpr int64_t gap_floats = 0, gap_count = 0;
inline void poison(void*, size_t) {}
inline void unpoison(void*, size_t) {}
#endif

// A buffer that grows and is kept until its thread ends: allocating per call costs page faults.
// Use one `thread_local Scratch` per purpose; a second call of `floats` reuses the same memory.
class Scratch {
 public:
  ~Scratch() { release(); }

  // [count] floats, uninitialised, aligned to 2 MiB. Owned by this object, and valid until the next
  // call.
  float* floats(size_t count) {
    const size_t bytes = count * sizeof(float);
    if (bytes > bytes_) {
      release();
      const size_t rounded = (bytes + huge_page - 1) / huge_page * huge_page;
      data_ = std::aligned_alloc(huge_page, rounded);
      if (!data_) throw std::bad_alloc();
      bytes_ = rounded;
      prefer_huge_pages(data_, bytes_);
    }
    poison(data_, bytes_);
    unpoison(data_, bytes);
    return static_cast<float*>(data_);
  }

 private:
  void release() {
    unpoison(data_, bytes_);
    std::free(data_);
    data_ = nullptr;
    bytes_ = 0;
  }

  void* data_ = nullptr;  // owned, bytes_ long
  size_t bytes_ = 0;
};

// Hands out consecutive, cache-line aligned parts of one Scratch buffer. The caller passes the
// total in floats, with room for the alignment of each part; a part beyond it raises.
class BumpAllocator {
 public:
  BumpAllocator(Scratch& scratch, int64_t floats)
      : next_(scratch.floats(floats + gap_count * gap_floats)),
        end_(next_ + floats + gap_count * gap_floats) {
    poison(next_, (end_ - next_) * sizeof(float));
  }

  // [count] elements, uninitialised. Valid as long as the Scratch buffer is.
  template <class T = float>
  T* allocate(int64_t count) {
    const int64_t floats = (count * sizeof(T) + 63) / 64 * 16;
    if (floats > end_ - next_)
      throw std::length_error("isobit: expected scratch memory for " + std::to_string(floats) +
                              " more floats\n  received: room for " + std::to_string(end_ - next_) +
                              "\n  remedy: please report this; the kernel asks for too little");
    T* allocated = reinterpret_cast<T*>(next_);
    unpoison(allocated, count * sizeof(T));
    next_ += floats + gap_floats;
    return allocated;
  }

 private:
  float *next_, *end_;  // the free floats of the Scratch buffer, which is not owned
};

}  // namespace isobit

// Memory for results and for scratch, on huge pages where the system grants them.
//
// A tile of a product touches one page per row. With 4 KiB pages, walking a virtual machine's
// nested page tables costs more time than merging the partial sums. Large buffers therefore ask the
// kernel for 2 MiB pages, as torch does when THP_MEM_ALLOC_ENABLE is set.
#pragma once

#include <ATen/core/Tensor.h>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
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

// A contiguous CPU tensor, uninitialised. Defined in memory.cpp: torch's headers compile slowly.
at::Tensor empty_tensor(at::IntArrayRef shape, at::ScalarType dtype);

// A buffer that grows and is kept until its thread ends: allocating per call costs page faults.
// Use one `thread_local Scratch` per purpose; a second call of `floats` reuses the same memory.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // [count] floats, uninitialised, aligned to 2 MiB. Owned by this object, and valid until the next
  // call.
  float* floats(size_t count) {
    const size_t bytes = count * sizeof(float);
    if (bytes > bytes_) {
      std::free(data_);
      bytes_ = (bytes + huge_page - 1) / huge_page * huge_page;
      data_ = std::aligned_alloc(huge_page, bytes_);
      if (!data_) {
        bytes_ = 0;
        throw std::bad_alloc();
      }
      prefer_huge_pages(data_, bytes_);
    }
    return static_cast<float*>(data_);
  }

 private:
  void* data_ = nullptr;  // owned, bytes_ long
  size_t bytes_ = 0;
};

// Hands out consecutive, cache-line aligned parts of one Scratch buffer. Does not check its bound:
// the caller passes the total in floats, with room for the alignment of each part.
class BumpAllocator {
 public:
  BumpAllocator(Scratch& scratch, int64_t floats) : next_(scratch.floats(floats)) {}

  // [count] elements, uninitialised. Valid as long as the Scratch buffer is.
  template <class T = float>
  T* allocate(int64_t count) {
    T* allocated = reinterpret_cast<T*>(next_);
    next_ += (count * sizeof(T) + 63) / 64 * 16;
    return allocated;
  }

 private:
  float* next_;  // the first free float of the Scratch buffer, which is not owned
};

}  // namespace isobit

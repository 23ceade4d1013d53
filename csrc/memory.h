// Memory for results and scratch, on huge pages where the system grants them.
//
// A tile touches one page per row. With 4 KiB pages the walks of a virtual machine's nested page
// tables cost more than the merges do; the kernel is asked for 2 MiB pages instead, as
// THP_MEM_ALLOC_ENABLE does for torch.
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

inline void prefer_huge_pages(void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t begin =
      (reinterpret_cast<uintptr_t>(data) + huge_page - 1) / huge_page * huge_page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / huge_page * huge_page;
  if (begin < end)
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: may be refused
#endif
}

at::Tensor empty_tensor(at::IntArrayRef shape,
                        at::ScalarType type);  // in memory.cpp: torch's headers compile slowly

// Per thread, grown and kept: a fresh allocation per call would be paid in page faults.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
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
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace isobit

// Shows whether these kernels and torch use the same OpenMP runtime. Called after loading.
#include <omp.h>

namespace at {
int get_num_threads();  // torch's; it asks the runtime that torch is bound to
}

extern "C" {

// An address inside the runtime that the kernels are bound to.
const void* isobit_openmp_address() { return reinterpret_cast<const void*>(&omp_get_max_threads); }

// The thread count is a setting of the calling thread in one runtime. What the kernels set, torch
// reads back, or it has another runtime: then kernels would ignore torch.set_num_threads, and two
// pools of threads would share the cores.
bool isobit_shares_openmp() {
  const int before = at::get_num_threads();
  const int own = omp_get_max_threads();
  omp_set_num_threads(before + 1);
  const bool shared = at::get_num_threads() == before + 1;
  omp_set_num_threads(own);
  return shared;
}

}  // extern "C"

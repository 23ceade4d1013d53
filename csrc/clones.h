// Function multi-versioning: compile a loop for AVX-512, AVX2 and the x86-64 baseline.
//
// The dynamic loader selects one version when the library is loaded. All versions give the same
// bits: the loops run across independent outputs, never across the terms of one sum, and the build
// disables floating-point contraction.
//
// GCC does not support `target_clones` on templates. A kernel is therefore written as an
// ISOBIT_INLINE template, and a macro defines one ISOBIT_CLONES function per element type that
// calls it (for example ISOBIT_STEPS in adamw.cpp).
#pragma once

#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ISOBIT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
// A function that is called only where has_avx512() is true.
#define ISOBIT_AVX512 __attribute__((target("arch=x86-64-v4")))
#define ISOBIT_OLDER __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define ISOBIT_CLONES
#define ISOBIT_OLDER
#endif

// [Note: versions] A kernel that uses Floats4 (lanes.h) where there are registers for it is a macro
// define(attribute, four, T) of functions whose first argument is std::bool_constant<four>.
// ISOBIT_VERSIONS defines them for AVX-512 with four = true and for the rest with four = false, and
// call_version chooses one.
#ifdef ISOBIT_AVX512
#define ISOBIT_VERSIONS(define, T) define(ISOBIT_AVX512, true, T) define(ISOBIT_OLDER, false, T)
#else
#define ISOBIT_VERSIONS(define, T) define(ISOBIT_OLDER, false, T)
#endif

#define ISOBIT_INLINE inline __attribute__((always_inline))

namespace isobit {

inline bool has_avx512() {
#ifdef ISOBIT_AVX512
  static const bool has = __builtin_cpu_supports("x86-64-v4");
  return has;
#else
  return false;
#endif
}

// Calls work(std::bool_constant<four>()); see [Note: versions].
template <class Work>
void call_version(const Work& work) {
#ifdef ISOBIT_AVX512
  if (has_avx512()) return work(std::true_type());
#endif
  work(std::false_type());
}

}  // namespace isobit

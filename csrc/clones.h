// Function multi-versioning: compile a loop for AVX-512, AVX2 and the x86-64 baseline.
//
// The dynamic loader selects one version when the library is loaded. All versions give the same
// bits: the loops run across independent outputs, never across the terms of one sum, and the build
// disables floating-point contraction.
//
// GCC does not support `target_clones` on templates. A kernel is therefore written as an
// ISOBIT_INLINE template, and a macro defines one ISOBIT_CLONES function per element type that
// calls it (for example ISOBIT_SOFTMAX in softmax.cpp).
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ISOBIT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ISOBIT_CLONES
#endif

#define ISOBIT_INLINE inline __attribute__((always_inline))

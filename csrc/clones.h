// Compiles a loop for AVX-512, AVX2 and the baseline; the loader picks. The loops add nothing
// across lanes and contract nothing, so the three give the same bits.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ISOBIT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ISOBIT_CLONES
#endif

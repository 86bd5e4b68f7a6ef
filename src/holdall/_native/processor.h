/* Which instructions the processor has. */
#ifndef HOLDALL_PROCESSOR_H
#define HOLDALL_PROCESSOR_H

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define HAVE_X86 1
/* Whether the processor has SSSE3, which shuffles bytes. */
int has_ssse3(void);
/* Whether the processor has AVX2 and BMI2, and the system saves its registers. */
int has_avx2(void);
#endif

/* FETCH_SOON loads a cache line that is needed soon. GCC regards a function that only does this as one without effect, and
 * removes calls of it. PREFETCHER declares such functions: GCC inlines them before it removes calls. */
#if defined(__GNUC__) || defined(__clang__)
#define FETCH_SOON(where) __builtin_prefetch(where)
#define PREFETCHER static inline __attribute__((always_inline))
#else
#define FETCH_SOON(where) ((void)0)
#define PREFETCHER static inline
#endif

#endif

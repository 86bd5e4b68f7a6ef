/* What every C file of the library starts from: the export macro, and what the processor can do. */
#ifndef HOLDALL_H
#define HOLDALL_H

#include <stddef.h>
#include <stdint.h>

/* Everything is hidden but what carries EXPORT; the names of those functions begin with holdall_. */
#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define HAVE_X86 1
/* Whether the processor has SSSE3, which shuffles bytes; asked once. */
int has_ssse3(void);
/* Whether it has AVX2 and BMI2, as nearly all that have the one do, and the system keeps its registers. */
int has_avx2(void);
#endif

#if defined(__GNUC__) || defined(__clang__)
#define FETCH_SOON(where) __builtin_prefetch(where)
#else
#define FETCH_SOON(where) ((void)0)
#endif

#endif

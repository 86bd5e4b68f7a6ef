/* Which instructions the processor has. It is asked once, and the answer is kept.
 *
 * __builtin_cpu_supports of the compilers needs a runtime library that not every linker adds to a shared library. */
#include "processor.h"

#ifdef HAVE_X86
#include <cpuid.h>
#include <stdatomic.h>

enum { UNKNOWN = 0, NO = 1, YES = 2 };

/* SSSE3 uses no registers that the system has to save for it, so the answer of the processor is enough. */
int has_ssse3(void) {
    static _Atomic int known;
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer == UNKNOWN) {
        unsigned a, b, c = 0, d;
        answer = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSSE3) ? YES : NO;
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer == YES;
}

int has_avx2(void) {
    static _Atomic int known;
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer == UNKNOWN) {
        unsigned a, b, c = 0, d, saved = 0;
        if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE)) __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
        const int is_saved = (saved & 6) == 6;
        const int has_both = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2) && (b & bit_BMI2);
        answer = is_saved && has_both ? YES : NO;
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer == YES;
}
#endif

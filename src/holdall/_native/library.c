/* What the loader in library.py asks first: the version, and the processor. */
#include "holdall.h"

#include <stdatomic.h>
#ifdef HAVE_X86
#include <cpuid.h>

/* The compilers' own question, __builtin_cpu_supports, needs a runtime library that not every linker adds to a shared
 * library. SSSE3 uses no registers that the system has to save for it, so the processor's answer is enough. */
int has_ssse3(void) {
    static _Atomic int known; /* 0: not asked yet, 1: no, 2: yes */
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer == 0) {
        unsigned a, b, c = 0, d;
        answer = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSSE3) ? 2 : 1;
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer == 2;
}
#endif

/* Raised with every change of an exported function; library.py expects the same number. */
EXPORT int64_t holdall_version(void) { return 33; }

/* What the loader in library.py asks first: the version, the processor, and the compression inside. */
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
EXPORT int64_t holdall_version(void) { return 29; }

/* A function of Zstandard or LZ4; Python casts it to its real type. */
typedef void (*named_function)(void);

#ifdef HOLDALL_COMPRESSION /* wheels; a build on the user's machine uses the libraries that are installed there */
#include <lz4.h>
#include <lz4hc.h>
#include <string.h>
#include <zstd.h>

#define FUNCTION(name) {#name, (named_function)name}

static const struct {
    const char *name;
    named_function function;
} COMPRESSION[] = {
    FUNCTION(ZSTD_createCCtx),
    FUNCTION(ZSTD_freeCCtx),
    FUNCTION(ZSTD_CCtx_setParameter),
    FUNCTION(ZSTD_CCtx_refCDict),
    FUNCTION(ZSTD_CCtx_refPrefix),
    FUNCTION(ZSTD_compress2),
    FUNCTION(ZSTD_createDCtx),
    FUNCTION(ZSTD_freeDCtx),
    FUNCTION(ZSTD_DCtx_refPrefix),
    FUNCTION(ZSTD_decompressDCtx),
    FUNCTION(ZSTD_decompress_usingDDict),
    FUNCTION(ZSTD_createCDict),
    FUNCTION(ZSTD_freeCDict),
    FUNCTION(ZSTD_createDDict),
    FUNCTION(ZSTD_freeDDict),
    FUNCTION(ZSTD_isError),
    FUNCTION(LZ4_decompress_safe_usingDict),
    FUNCTION(LZ4_compress_default),
    FUNCTION(LZ4_compress_HC),
    FUNCTION(LZ4_createStreamHC),
    FUNCTION(LZ4_freeStreamHC),
    FUNCTION(LZ4_sizeofStateHC),
    FUNCTION(LZ4_resetStreamHC_fast),
    FUNCTION(LZ4_loadDictHC),
    FUNCTION(LZ4_compress_HC_continue),
};

/* A function of Zstandard or LZ4 that is linked in; NULL if there is none of this name. */
EXPORT named_function holdall_compression(const char *name) {
    for (size_t i = 0; i < sizeof COMPRESSION / sizeof *COMPRESSION; i++)
        if (strcmp(COMPRESSION[i].name, name) == 0) return COMPRESSION[i].function;
    return NULL;
}
#else
/* None is linked in. */
EXPORT named_function holdall_compression(const char *name) {
    (void)name;
    return NULL;
}
#endif

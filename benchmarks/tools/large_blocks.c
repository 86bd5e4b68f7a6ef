/* Record the large blocks that a process allocates, for benchmarks/tools/probe_scripts.py. Loaded with LD_PRELOAD.

   Every malloc, calloc, realloc, posix_memalign and aligned_alloc of MIN_BYTES or more is entered into a table, and removed when it is
   freed. On SIGUSR2 the process writes the table to the file BLOCKS_FOLDER/PID.TIME: one line "address bytes" for a live block,
   and "failed bytes" for an allocation that failed. The sizes are those that were asked for, so they are exact to the byte. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MIN_BYTES = 1 << 16, MAX_BLOCKS = 1 << 16 };

typedef struct {
    atomic_uintptr_t address;
    size_t bytes;
} Block;

static Block blocks[MAX_BLOCKS];
static atomic_size_t used;
static size_t failed[64];
static atomic_size_t failures;

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *address);

/* Enter a block, or a failed allocation if `address` is NULL. Return `address`. */
static void *enter(void *address, size_t bytes) {
    if (bytes < MIN_BYTES) {
        return address;
    }
    if (address == NULL) {
        size_t place = atomic_fetch_add(&failures, 1);
        failed[place % 64] = bytes;
        return NULL;
    }
    size_t count = atomic_load(&used);
    for (size_t index = 0; index < MAX_BLOCKS; index++) {
        uintptr_t expected = 0;
        if (index >= count) {
            atomic_compare_exchange_strong(&used, &count, index + 1);
        }
        if (atomic_load(&blocks[index].address) == 0
            && atomic_compare_exchange_strong(&blocks[index].address, &expected, (uintptr_t)address)) {
            blocks[index].bytes = bytes;
            return address;
        }
    }
    return address;
}

static void forget(void *address) {
    if (address == NULL || malloc_usable_size(address) < MIN_BYTES) {
        return;
    }
    size_t count = atomic_load(&used);
    for (size_t index = 0; index < count; index++) {
        if (atomic_load(&blocks[index].address) == (uintptr_t)address) {
            atomic_store(&blocks[index].address, 0);
            return;
        }
    }
}

void *malloc(size_t bytes) { return enter(__libc_malloc(bytes), bytes); }

void *calloc(size_t count, size_t bytes) {
    void *address = __libc_calloc(count, bytes);
    return enter(address, count * bytes);
}

void *realloc(void *old, size_t bytes) {
    forget(old);
    return enter(__libc_realloc(old, bytes), bytes);
}

void *memalign(size_t alignment, size_t bytes) { return enter(__libc_memalign(alignment, bytes), bytes); }

void *aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void **address, size_t alignment, size_t bytes) {
    *address = memalign(alignment, bytes);
    return *address == NULL ? ENOMEM : 0;
}

void free(void *address) {
    forget(address);
    __libc_free(address);
}

static void write_table(int number) {
    (void)number;
    const char *folder = getenv("BLOCKS_FOLDER");
    char name[512];
    char line[64];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    snprintf(name, sizeof name, "%s/%d.%lld.part", folder, (int)getpid(), (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000);
    int file = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0) {
        return;
    }
    for (size_t index = 0; index < atomic_load(&used); index++) {
        uintptr_t address = atomic_load(&blocks[index].address);
        if (address != 0) {
            int length = snprintf(line, sizeof line, "%zx %zu\n", (size_t)address, blocks[index].bytes);
            if (write(file, line, (size_t)length) < 0) {
                break;
            }
        }
    }
    for (size_t index = 0; index < atomic_load(&failures) && index < 64; index++) {
        int length = snprintf(line, sizeof line, "failed %zu\n", failed[index]);
        if (write(file, line, (size_t)length) < 0) {
            break;
        }
    }
    close(file);
    char complete[512];
    snprintf(complete, sizeof complete, "%.*s", (int)(strlen(name) - 5), name);
    rename(name, complete);
}

__attribute__((constructor)) static void install(void) {
    struct sigaction action = {.sa_handler = write_table, .sa_flags = SA_RESTART};
    if (getenv("BLOCKS_FOLDER") != NULL) {
        sigaction(SIGUSR2, &action, NULL);
    }
}

/* A failed allocation ends most commands, so the table is also written at the end. */
__attribute__((destructor)) static void finish(void) {
    if (getenv("BLOCKS_FOLDER") != NULL && (atomic_load(&used) || atomic_load(&failures))) {
        write_table(0);
    }
}

/* Pages that are made present before they are written, see pages.c. */
#ifndef HOLDALL_PAGES_H
#define HOLDALL_PAGES_H

#include <stdint.h>

typedef struct page_feeder page_feeder;

/* Say how far the memory of a block is written, which is the feeder's arena `number`; return when to say it next. */
int64_t pages_ask(page_feeder *feeder, int64_t number, const uint8_t *start, int64_t used_bytes);

#endif

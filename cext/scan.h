/* Finds the changed elements of a block of a buffer. No threads here. */
#ifndef JAXRL_SCAN_H
#define JAXRL_SCAN_H

#include <stdint.h>

/* Where a block's entries go: room for as many as the block has elements. */
typedef struct {
    uint32_t *positions;
    char *new, *old; /* `old` may be NULL; with a mask `new` too */
} entries;

/* Entries of [begin, end); `begin` is a multiple of 32. Return how many; the room after them may be written to. */
int64_t scan_changed(const char *old, const char *new, int itemsize, int64_t begin, int64_t end, entries out);
int64_t scan_mask(const uint32_t *words, const char *new, int itemsize, int64_t begin, int64_t end, entries out);

#endif

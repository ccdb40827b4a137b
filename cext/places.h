/* Places of the entries of a section: see places.c. */
#ifndef JAXRL_PLACES_H
#define JAXRL_PLACES_H

#include "kernels.h"

/* One copy of a section. Inner sizes and strides are in elements; axes are in the order of the stream. */
typedef struct {
    int64_t start, elements;            /* in the section's stream */
    int64_t group;                      /* index of the pair of sums */
    int64_t ndim;
    int64_t target, row, column;        /* of the copy's first element: in the slot, and global */
    int64_t inner[MAX_DIMS];
    int64_t target_stride[MAX_DIMS];
    int64_t row_stride[MAX_DIMS];
    int64_t column_stride[MAX_DIMS];
} place_entry;

/* With `memory`: codes are applied to it, `index` and `new_out` say where and what. Without: `codes` are the new
 * bits and `old` the old ones. `sums` get what the keyed sums change by. */
typedef struct {
    const uint32_t *positions;
    int64_t count;
    int itemsize, kind;
    const void *codes;
    void *memory;
    int64_t elements;
    void *old;
    int64_t *index;
    void *new_out;
    uint32_t *sums;
} places_job;

/* 0, or a refusal of delta.h: an element outside of the memory; what came before it is written. */
int64_t run_places(const place_entry *entries, int64_t count, const places_job *job, int threads);

#endif

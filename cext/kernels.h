/* CPU kernels of jaxrl_sync.sharding: tables of strided copies, keyed digests. No Python here. */
#ifndef JAXRL_KERNELS_H
#define JAXRL_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define MAX_DIMS 6
#define MAX_GANG 8

/* One strided copy. All offsets and strides are bytes; `run` contiguous bytes are moved per index. An entry with
 * `gang` g leads: it and the g - 1 entries after it (their `gang` is 0) have equal run and shape and are copied
 * together, row by row. */
typedef struct {
    int64_t source, target;             /* index of the buffer on each side */
    int64_t source_offset, target_offset;
    int64_t run;
    int64_t gang;
    int64_t ndim;
    int64_t shape[MAX_DIMS];
    int64_t source_stride[MAX_DIMS];
    int64_t target_stride[MAX_DIMS];
} copy_entry;

/* One strided block to sum; an element's key is row_key(row) * column_key(column). */
typedef struct {
    int64_t source, group;              /* index of the buffer; index of the pair of sums */
    int64_t offset;
    int64_t itemsize;                   /* 1, 2, 4 or 8 bytes */
    int64_t ndim;
    int64_t row, column;
    int64_t shape[MAX_DIMS];
    int64_t stride[MAX_DIMS];
    int64_t row_stride[MAX_DIMS];
    int64_t column_stride[MAX_DIMS];
} sum_entry;

/* One strided copy that is summed on the way; the last axis is contiguous on both sides and within one row. */
typedef struct {
    int64_t source, target, group;
    int64_t source_offset, target_offset;
    int64_t itemsize;
    int64_t ndim;                       /* at least 1 */
    int64_t row, column;
    int64_t shape[MAX_DIMS];
    int64_t source_stride[MAX_DIMS];
    int64_t target_stride[MAX_DIMS];
    int64_t row_stride[MAX_DIMS];
    int64_t column_stride[MAX_DIMS];
} summed_entry;

void run_copies(const copy_entry *entries, int64_t count, const uintptr_t *sources, const uintptr_t *targets,
                int threads, int streaming);
void run_sums(const sum_entry *entries, int64_t count, const uintptr_t *sources, uint32_t *sums, int threads);
void run_summed(const summed_entry *entries, int64_t count, const uintptr_t *sources, const uintptr_t *targets,
                uint32_t *sums, int threads, int streaming);
int has_avx2(void);

/* Copies `n` contiguous bytes, by streaming stores if asked and worth it; finish_streaming before anyone reads. */
void copy_run(char *to, const char *from, int64_t n, int streaming);
void finish_streaming(int streaming);

#define KEY_TILE 2048 /* column keys kept at a time: 2 x 8 KiB, within L1 */

void column_keys(uint32_t *k0, uint32_t *k1, int64_t column, int64_t step, int64_t n);
/* Adds the keyed sums of `n` contiguous elements of one row. */
void sum_contiguous(const char *p, int64_t n, int64_t itemsize, int64_t row, const uint32_t *k0,
                    const uint32_t *k1, uint32_t total[2]);

/* The bytes of the entries' runs, in order, a gang's row by row, to a socket (sources) or from it (targets); starts `skip` bytes into
 * them and moves at most `limit`. Returns how many; *error is an errno where it stopped early, EAGAIN after the
 * socket's own timeout, ECONNRESET at the end of the stream. */
int64_t run_stream(int fd, int receive, const copy_entry *entries, int64_t count, const uintptr_t *buffers,
                   int64_t skip, int64_t limit, int *error);

/* Calls `work(state, index)` for every index below `count` on `threads` threads (this one included). */
void parallel_for(void (*work)(void *state, int64_t index), void *state, int64_t count, int threads);

#endif

/* Strided copies that also sum what they read, keyed by position as in sums.c: the second look at a piece of a
 * row finds it in the L1 cache, so that a sender's digest costs arithmetic and no memory traffic. */
#include "kernels.h"

typedef struct {
    const summed_entry *entries;
    const uintptr_t *sources, *targets;
    uint32_t *sums;
    int streaming;
} summed_job;

/* All rows of one tile of the last axis, which is contiguous on both sides. */
static void copy_tile(const summed_job *job, const summed_entry *e, int64_t j0, int64_t n, uint32_t total[2])
{
    uint32_t k0[KEY_TILE], k1[KEY_TILE];
    int64_t last = e->ndim - 1, at[MAX_DIMS] = {0}, d;
    const char *from = (const char *)job->sources[e->source] + e->source_offset + j0 * e->itemsize;
    char *to = (char *)job->targets[e->target] + e->target_offset + j0 * e->itemsize;
    int64_t row = e->row, column = e->column + j0 * e->column_stride[last], keyed = column;
    column_keys(k0, k1, keyed, e->column_stride[last], n);
    do {
        if (column != keyed)
            column_keys(k0, k1, keyed = column, e->column_stride[last], n);
        sum_contiguous(from, n, e->itemsize, row, k0, k1, total);
        copy_run(to, from, n * e->itemsize, job->streaming);
        for (d = last - 1; d >= 0; d--) {
            int64_t back = ++at[d] < e->shape[d] ? 0 : e->shape[d];
            from += e->source_stride[d] * (1 - back);
            to += e->target_stride[d] * (1 - back);
            row += e->row_stride[d] * (1 - back);
            column += e->column_stride[d] * (1 - back);
            if (back == 0)
                break;
            at[d] = 0;
        }
    } while (d >= 0);
}

static void copy_and_sum(void *state, int64_t index)
{
    const summed_job *job = state;
    const summed_entry *e = &job->entries[index];
    uint32_t total[2] = {0, 0};
    for (int64_t d = 0; d < e->ndim; d++)
        if (e->shape[d] <= 0)
            return;
    int64_t n = e->shape[e->ndim - 1];
    for (int64_t j = 0; j < n; j += KEY_TILE)
        copy_tile(job, e, j, j + KEY_TILE < n ? KEY_TILE : n - j, total);
    finish_streaming(job->streaming);
    __atomic_fetch_add(&job->sums[2 * e->group], total[0], __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->sums[2 * e->group + 1], total[1], __ATOMIC_RELAXED);
}

void run_summed(const summed_entry *entries, int64_t count, const uintptr_t *sources, const uintptr_t *targets,
                uint32_t *sums, int threads, int streaming)
{
    summed_job job = {entries, sources, targets, sums, streaming && has_avx2()};
    parallel_for(copy_and_sum, &job, count, threads);
}

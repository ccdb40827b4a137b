/* Strided copies that also sum what they read, keyed by position as in sums.c: the second look at a piece of a
 * row finds it in the L1 cache, so that a sender's digest costs arithmetic and no memory traffic. */
#include "kernels.h"

#define LANES 4 /* rows far apart, copied in turns: see copies.c */

/* Where one lane stands: an index of the outer axes, its place on each side and its position. */
typedef struct {
    int64_t at[MAX_DIMS];
    const char *from;
    char *to;
    int64_t row, column;
} lane;

static void lane_move(lane *l, const summed_entry *e, int64_t d, int64_t steps)
{
    l->from += steps * e->source_stride[d];
    l->to += steps * e->target_stride[d];
    l->row += steps * e->row_stride[d];
    l->column += steps * e->column_stride[d];
}

static void lane_step(lane *l, const summed_entry *e)
{
    for (int64_t d = e->ndim - 2; d >= 0; d--) {
        lane_move(l, e, d, 1);
        if (++l->at[d] < e->shape[d])
            return;
        lane_move(l, e, d, -e->shape[d]);
        l->at[d] = 0;
    }
}

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
    int64_t rows = 1, moving = 0, last = e->ndim - 1, bytes = n * e->itemsize;
    for (int64_t d = 0; d < last; d++) {
        rows *= e->shape[d];
        moving |= e->column_stride[d];
    }
    int lanes = rows >= LANES && !moving ? LANES : 1;
    int64_t each = rows / lanes, keyed = e->column + j0 * e->column_stride[last];
    lane at[LANES + 1];
    for (int k = 0; k <= lanes; k++) {
        int64_t row = k * each;
        at[k] = (lane){.from = (const char *)job->sources[e->source] + e->source_offset + j0 * e->itemsize,
                       .to = (char *)job->targets[e->target] + e->target_offset + j0 * e->itemsize,
                       .row = e->row,
                       .column = keyed};
        for (int64_t d = last - 1; d >= 0; d--) {
            at[k].at[d] = row % e->shape[d];
            lane_move(&at[k], e, d, at[k].at[d]);
            row /= e->shape[d];
        }
    }
    column_keys(k0, k1, keyed, e->column_stride[last], n);
    /* The rows that the lanes leave over are those of lane number `lanes`. */
    for (int64_t i = 0; i < each + rows % lanes; i++)
        for (int k = i < each ? 0 : lanes; k < (i < each ? lanes : lanes + 1); k++) {
            lane *l = &at[k];
            if (l->column != keyed)
                column_keys(k0, k1, keyed = l->column, e->column_stride[last], n);
            sum_contiguous(l->from, n, e->itemsize, l->row, k0, k1, total);
            copy_run(l->to, l->from, bytes, job->streaming);
            lane_step(l, e);
        }
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

/* Keyed sums modulo 2^32: sum over elements of bits * row_key(row) * column_key(column), twice with other
 * keys. uint32 arithmetic only; the numpy form in kernels.py gives the same numbers. */
#include "kernels.h"
#include "keys.h"

#include <string.h>

#if defined(FAST) /* empty for gcc -fanalyzer, which doesn't see through the choice of a clone */
#elif defined(__x86_64__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

FAST void column_keys(uint32_t *k0, uint32_t *k1, int64_t column, int64_t step, int64_t n)
{
    for (int64_t j = 0; j < n; j++) {
        k0[j] = key(column + j * step, column_seed[0]);
        k1[j] = key(column + j * step, column_seed[1]);
    }
}

#define DEFINE_ROW(NAME, TYPE, BITS)                                                                          \
    FAST static void NAME(const char *p, int64_t n, const uint32_t *k0, const uint32_t *k1, uint32_t out[2])  \
    {                                                                                                         \
        uint32_t s0 = 0, s1 = 0;                                                                              \
        for (int64_t j = 0; j < n; j++) {                                                                     \
            TYPE v;                                                                                           \
            memcpy(&v, p + j * (int64_t)sizeof(TYPE), sizeof(TYPE));                                          \
            uint32_t b = BITS;                                                                                \
            s0 += b * k0[j];                                                                                  \
            s1 += b * k1[j];                                                                                  \
        }                                                                                                     \
        out[0] = s0;                                                                                          \
        out[1] = s1;                                                                                          \
    }

DEFINE_ROW(row_1, uint8_t, v)
DEFINE_ROW(row_2, uint16_t, v)
DEFINE_ROW(row_4, uint32_t, v)
DEFINE_ROW(row_8, uint64_t, (uint32_t)v + (uint32_t)(v >> 32) * HIGH_WORD)

void sum_contiguous(const char *p, int64_t n, int64_t itemsize, int64_t row, const uint32_t *k0,
                    const uint32_t *k1, uint32_t total[2])
{
    uint32_t out[2];
    switch (itemsize) {
    case 1:
        row_1(p, n, k0, k1, out);
        break;
    case 2:
        row_2(p, n, k0, k1, out);
        break;
    case 4:
        row_4(p, n, k0, k1, out);
        break;
    default:
        row_8(p, n, k0, k1, out);
    }
    total[0] += out[0] * key(row, row_seed[0]);
    total[1] += out[1] * key(row, row_seed[1]);
}

static uint32_t bits_at(const char *p, int64_t itemsize)
{
    uint8_t a;
    uint16_t b;
    uint32_t c;
    uint64_t d;
    switch (itemsize) {
    case 1:
        memcpy(&a, p, 1);
        return a;
    case 2:
        memcpy(&b, p, 2);
        return b;
    case 4:
        memcpy(&c, p, 4);
        return c;
    default:
        memcpy(&d, p, 8);
        return (uint32_t)d + (uint32_t)(d >> 32) * HIGH_WORD;
    }
}

static void sum_row(const sum_entry *e, const char *p, int64_t n, int64_t row, const uint32_t *k0,
                    const uint32_t *k1, uint32_t out[2])
{
    int64_t d = e->ndim - 1, stride = e->stride[d], row_step = e->row_stride[d];
    out[0] = out[1] = 0;
    if (stride == e->itemsize && row_step == 0) {
        sum_contiguous(p, n, e->itemsize, row, k0, k1, out);
        return;
    }
    for (int64_t j = 0; j < n; j++) {
        uint32_t b = bits_at(p + j * stride, e->itemsize);
        out[0] += b * k0[j] * key(row + j * row_step, row_seed[0]);
        out[1] += b * k1[j] * key(row + j * row_step, row_seed[1]);
    }
}

/* All rows of one tile of the last dimension. Keys are made again only where the row's first column moves. */
static void sum_tile(const sum_entry *e, const char *base, int64_t j0, int64_t n, uint32_t total[2])
{
    uint32_t k0[KEY_TILE], k1[KEY_TILE], part[2];
    int64_t last = e->ndim - 1, at[MAX_DIMS] = {0};
    const char *p = base + e->offset + j0 * e->stride[last];
    int64_t row = e->row + j0 * e->row_stride[last], column = e->column + j0 * e->column_stride[last];
    int64_t keyed = column;
    column_keys(k0, k1, column, e->column_stride[last], n);
    for (;;) {
        if (column != keyed) {
            column_keys(k0, k1, column, e->column_stride[last], n);
            keyed = column;
        }
        sum_row(e, p, n, row, k0, k1, part);
        total[0] += part[0];
        total[1] += part[1];
        int64_t d = last - 1;
        for (; d >= 0; d--) {
            p += e->stride[d];
            row += e->row_stride[d];
            column += e->column_stride[d];
            if (++at[d] < e->shape[d])
                break;
            p -= e->stride[d] * e->shape[d];
            row -= e->row_stride[d] * e->shape[d];
            column -= e->column_stride[d] * e->shape[d];
            at[d] = 0;
        }
        if (d < 0)
            return;
    }
}

typedef struct {
    const sum_entry *entries;
    const uintptr_t *sources;
    uint32_t *sums;
} sum_job;

static void sum_one(void *state, int64_t index)
{
    const sum_job *job = state;
    const sum_entry *e = &job->entries[index];
    const char *base = (const char *)job->sources[e->source];
    uint32_t total[2] = {0, 0};
    int64_t n = e->shape[e->ndim - 1];
    for (int64_t j = 0; j < n; j += KEY_TILE)
        sum_tile(e, base, j, j + KEY_TILE < n ? KEY_TILE : n - j, total);
    __atomic_fetch_add(&job->sums[2 * e->group], total[0], __ATOMIC_RELAXED);
    __atomic_fetch_add(&job->sums[2 * e->group + 1], total[1], __ATOMIC_RELAXED);
}

void run_sums(const sum_entry *entries, int64_t count, const uintptr_t *sources, uint32_t *sums, int threads)
{
    sum_job job = {entries, sources, sums};
    parallel_for(sum_one, &job, count, threads);
}

/* Writes deltas into buffers. Positions are checked before the first write: a refused delta leaves no trace. */
#include "delta.h"
#include "kernels.h"

#include <stdlib.h>
#include <string.h>

#if defined(FAST) /* empty for gcc -fanalyzer, which doesn't see through the choice of a clone */
#elif defined(__x86_64__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

#define AHEAD 24      /* entries between a prefetch and its use: each write is a cache miss of its own */
#define SLICE 65536   /* entries per turn of a thread */

FAST static uint32_t disorder(const uint32_t *positions, int64_t count)
{
    uint32_t wrong = 0;
    for (int64_t i = 1; i < count; i++)
        wrong |= positions[i] <= positions[i - 1];
    return wrong;
}

static int64_t check_positions(const uint32_t *positions, int64_t count, int64_t n)
{
    if (count == 0)
        return 0;
    if (disorder(positions, count))
        return REFUSED_ORDER;
    return (int64_t)positions[count - 1] < n ? 0 : REFUSED_RANGE;
}

typedef struct {
    char *buffer;
    const uint32_t *positions;
    const char *values;
    char *old;
    int64_t count;
    int itemsize, kind;
} apply_job;

#define COMBINE(TYPE, kind, was, value)                                                                        \
    ((kind) == VALUES_OVERWRITE ? (value)                                                                      \
     : (kind) == VALUES_XOR     ? (TYPE)((was) ^ (value))                                                      \
                                : add_ulp_##TYPE(was, value))

#define DEFINE_APPLY(SUFFIX, TYPE)                                                                             \
    static inline TYPE add_ulp_##TYPE(TYPE was, TYPE code)                                                     \
    {                                                                                                          \
        TYPE v = (TYPE)(ORDERED(TYPE, was) + UNZIGZAG(TYPE, code));                                            \
        return UNORDERED(TYPE, v);                                                                             \
    }                                                                                                          \
    static inline __attribute__((always_inline)) void loop_##SUFFIX(const apply_job *job, int64_t begin,       \
                                                                    int64_t end, int kind, int keep)           \
    {                                                                                                          \
        TYPE *buffer = (TYPE *)job->buffer;                                                                    \
        for (int64_t i = begin; i < end; i++) {                                                                \
            if (i + AHEAD < end)                                                                               \
                __builtin_prefetch(&buffer[job->positions[i + AHEAD]], 1);                                     \
            TYPE was = 0, value;                                                                               \
            uint32_t at = job->positions[i];                                                                   \
            memcpy(&value, job->values + i * (int64_t)sizeof(TYPE), sizeof(TYPE));                             \
            if (keep || kind != VALUES_OVERWRITE)                                                              \
                was = buffer[at];                                                                              \
            if (keep)                                                                                          \
                memcpy(job->old + i * (int64_t)sizeof(TYPE), &was, sizeof(TYPE));                              \
            buffer[at] = COMBINE(TYPE, kind, was, value);                                                      \
        }                                                                                                      \
    }                                                                                                          \
    static void apply_##SUFFIX(const apply_job *job, int64_t begin, int64_t end)                               \
    {                                                                                                          \
        if (job->kind == VALUES_OVERWRITE && !job->old)                                                        \
            loop_##SUFFIX(job, begin, end, VALUES_OVERWRITE, 0);                                               \
        else                                                                                                   \
            loop_##SUFFIX(job, begin, end, job->kind, job->old != NULL);                                       \
    }

DEFINE_APPLY(1, uint8_t)
DEFINE_APPLY(2, uint16_t)
DEFINE_APPLY(4, uint32_t)

static void apply_slice(void *state, int64_t index)
{
    const apply_job *job = state;
    int64_t begin = index * SLICE, end = begin + SLICE < job->count ? begin + SLICE : job->count;
    if (job->itemsize == 1)
        apply_1(job, begin, end);
    else if (job->itemsize == 2)
        apply_2(job, begin, end);
    else
        apply_4(job, begin, end);
}

int64_t delta_apply(void *buffer, int64_t n, int itemsize, const uint32_t *positions, const void *values,
                    int64_t count, int kind, void *old_out, int threads)
{
    int64_t refused = check_positions(positions, count, n);
    if (refused)
        return refused;
    apply_job job = {buffer, positions, values, old_out, count, itemsize, kind};
    parallel_for(apply_slice, &job, (count + SLICE - 1) / SLICE, threads);
    return 0;
}

int64_t delta_gather(const void *buffer, int64_t n, int itemsize, const uint32_t *positions, int64_t count, void *out)
{
    int64_t refused = check_positions(positions, count, n);
    if (refused)
        return refused;
    const char *from = buffer;
    char *to = out;
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            __builtin_prefetch(from + (int64_t)positions[i + AHEAD] * itemsize);
        switch (itemsize) {
        case 1:
            to[i] = from[positions[i]];
            break;
        case 2:
            memcpy(to + 2 * i, from + 2 * (int64_t)positions[i], 2);
            break;
        default:
            memcpy(to + 4 * i, from + 4 * (int64_t)positions[i], 4);
        }
    }
    return 0;
}

/* Sum and number of entries of a gap stream; together they bound every position in it. */
FAST static void survey(const uint8_t *gaps, int64_t size, uint64_t *sum, uint64_t *entry_count)
{
    uint64_t total = 0, ends = 0;
    for (int64_t i = 0; i < size; i++) {
        total += gaps[i];
        ends += gaps[i] != 255;
    }
    *sum = total;
    *entry_count = ends;
}

static int64_t check_gaps(const uint8_t *gaps, int64_t gap_bytes, int64_t count, int64_t n)
{
    uint64_t sum, found;
    survey(gaps, gap_bytes, &sum, &found);
    if (found != (uint64_t)count)
        return found < (uint64_t)count ? REFUSED_SHORT : REFUSED_LONG;
    if (gap_bytes && gaps[gap_bytes - 1] == 255)
        return REFUSED_SHORT;
    return sum + found > (uint64_t)n ? REFUSED_RANGE : 0;
}

static int64_t check_escapes(const uint8_t *codes, int64_t count, const void *escapes, int64_t escape_count,
                             int itemsize)
{
    uint64_t sum, below;
    if (itemsize == 1)
        return escape_count ? REFUSED_LONG : 0;
    survey(codes, count, &sum, &below);
    if (count - (int64_t)below != escape_count)
        return count - (int64_t)below > escape_count ? REFUSED_SHORT : REFUSED_LONG;
    for (int64_t i = 0; i < escape_count; i++) {
        uint32_t z = itemsize == 2 ? ((const uint16_t *)escapes)[i] : ((const uint32_t *)escapes)[i];
        if (z < 255)
            return REFUSED_FORM;
    }
    return 0;
}

/* Positions are decoded a little ahead of the writes, so that the prefetches have time. */
#define CHUNK 512


static const uint8_t *take_gaps(const uint8_t *gaps, uint64_t *next, uint32_t *positions, int64_t count,
                                const char *buffer, int itemsize)
{
    uint64_t at = *next;
    for (int64_t k = 0; k < count;) {
        uint8_t gap = *gaps++;
        at += gap;
        if (gap == 255)
            continue;
        positions[k++] = (uint32_t)at;
        __builtin_prefetch(buffer + at * (unsigned)itemsize, 1);
        at++;
    }
    *next = at;
    return gaps;
}

/* Byte codes and their escapes as full-width codes. */
static const char *widen(const uint8_t *codes, int64_t count, const char *escapes, int itemsize, char *out)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t z = codes[i];
        if (z == 255 && itemsize > 1) {
            z = 0;
            memcpy(&z, escapes, (size_t)itemsize);
            escapes += itemsize;
        }
        if (itemsize == 1)
            out[i] = (char)z;
        else if (itemsize == 2)
            ((uint16_t *)(void *)out)[i] = (uint16_t)z;
        else
            ((uint32_t *)(void *)out)[i] = z;
    }
    return escapes;
}

/* Decodes all positions first, so that threads can share the writes. Streams have been checked. */
static int64_t apply_decoded(void *buffer, int64_t n, int itemsize, const uint8_t *gaps, int64_t gap_bytes,
                             const void *values, const void *escapes, int64_t count, int kind, int threads)
{
    int wide = kind == VALUES_ULP && itemsize > 1;
    uint32_t *positions = malloc((size_t)count * (sizeof(uint32_t) + (wide ? (size_t)itemsize : 0)));
    if (!positions)
        return REFUSED_MEMORY;
    int64_t refused = gaps_decode_u8(gaps, gap_bytes, (uint64_t)n, positions, count);
    if (!refused) {
        char *codes = (char *)(positions + count);
        if (wide)
            widen(values, count, escapes, itemsize, codes);
        apply_job job = {buffer, positions, wide ? codes : values, NULL, count, itemsize, kind};
        parallel_for(apply_slice, &job, (count + SLICE - 1) / SLICE, threads);
    }
    free(positions);
    return refused;
}

int64_t delta_apply_gaps(void *buffer, int64_t n, int itemsize, const uint8_t *gaps, int64_t gap_bytes,
                         const void *values, const void *escapes, int64_t escape_count, int64_t count, int kind,
                         int threads)
{
    int64_t refused = check_gaps(gaps, gap_bytes, count, n);
    if (!refused && kind == VALUES_ULP)
        refused = check_escapes(values, count, escapes, escape_count, itemsize);
    if (refused)
        return refused;
    if (threads > 1 && count > SLICE)
        return apply_decoded(buffer, n, itemsize, gaps, gap_bytes, values, escapes, count, kind, threads);
    uint32_t positions[CHUNK], wide[CHUNK];
    uint64_t next = 0;
    const char *escape = escapes;
    for (int64_t done = 0; done < count; done += CHUNK) {
        int64_t part = count - done < CHUNK ? count - done : CHUNK;
        const char *from = (const char *)values + done * itemsize;
        gaps = take_gaps(gaps, &next, positions, part, buffer, itemsize);
        if (kind == VALUES_ULP) {
            escape = widen((const uint8_t *)values + done, part, escape, itemsize, (char *)wide);
            from = (const char *)wide;
        }
        apply_job job = {buffer, positions, from, NULL, part, itemsize, kind};
        apply_slice(&job, 0);
    }
    return 0;
}

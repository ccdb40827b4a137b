/* Strided copies. Long rows go out by streaming stores, which spare the read of the destination line; two
 * crossed strides (a transpose) are walked in square tiles, so that each cache line is used whole. Rows that lie
 * side by side in one source buffer form a gang and are copied together: reads are then long, and only writes
 * are short, which costs streaming stores nothing. Far apart places are copied in turns, because one sequential
 * stream does not keep the memory busy. */
#include "kernels.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_X86 1
#else
#define HAVE_X86 0
#endif

#define TILE 32
#define STREAM_ALIGNED 128   /* shortest 32-byte aligned row worth streaming, bytes */
#define STREAM_UNALIGNED 4096
#define LANES 4              /* places of one table entry that are copied in turns */
#define PIECE 512            /* bytes of a turn */
#define LINE 64

int has_avx2(void)
{
#if HAVE_X86
    return __builtin_cpu_supports("avx2") != 0;
#else
    return 0;
#endif
}

#if HAVE_X86
__attribute__((target("avx2"))) static void stream_row(char *to, const char *from, int64_t n)
{
    int64_t head = (int64_t)(-(uintptr_t)to & 31);
    memcpy(to, from, (size_t)head);
    int64_t i = head;
    for (; i + 128 <= n; i += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + i + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + i + 96));
        _mm256_stream_si256((__m256i *)(to + i), a);
        _mm256_stream_si256((__m256i *)(to + i + 32), b);
        _mm256_stream_si256((__m256i *)(to + i + 64), c);
        _mm256_stream_si256((__m256i *)(to + i + 96), d);
    }
    for (; i + 32 <= n; i += 32)
        _mm256_stream_si256((__m256i *)(to + i), _mm256_loadu_si256((const __m256i *)(from + i)));
    memcpy(to + i, from + i, (size_t)(n - i));
}
#endif

void copy_run(char *to, const char *from, int64_t n, int streaming)
{
#if HAVE_X86
    int aligned = ((uintptr_t)to & 31) == 0;
    if (streaming && n >= (aligned ? STREAM_ALIGNED : STREAM_UNALIGNED)) {
        stream_row(to, from, n);
        return;
    }
#else
    (void)streaming;
#endif
    memcpy(to, from, (size_t)n);
}

void finish_streaming(int streaming)
{
#if HAVE_X86
    if (streaming)
        _mm_sfence();
#else
    (void)streaming;
#endif
}

/* n x m elements of a fixed size, both strides free; the compiler turns the fixed memcpy into a move. */
#define DEFINE_TILES(NAME, SIZE)                                                                              \
    static void NAME(char *to, const char *from, int64_t n, int64_t m, int64_t to_n, int64_t from_n,          \
                     int64_t to_m, int64_t from_m)                                                            \
    {                                                                                                         \
        for (int64_t i0 = 0; i0 < n; i0 += TILE)                                                              \
            for (int64_t j0 = 0; j0 < m; j0 += TILE) {                                                        \
                int64_t i1 = i0 + TILE < n ? i0 + TILE : n, j1 = j0 + TILE < m ? j0 + TILE : m;               \
                for (int64_t i = i0; i < i1; i++)                                                             \
                    for (int64_t j = j0; j < j1; j++)                                                         \
                        memcpy(to + i * to_n + j * to_m, from + i * from_n + j * from_m, SIZE);               \
            }                                                                                                 \
    }

DEFINE_TILES(tiles_1, 1)
DEFINE_TILES(tiles_2, 2)
DEFINE_TILES(tiles_4, 4)
DEFINE_TILES(tiles_8, 8)
DEFINE_TILES(tiles_16, 16)

/* Where one lane stands: an index of the entry's shape, and the addresses of that row for each member. */
typedef struct {
    int64_t at[MAX_DIMS];
    const char *from[MAX_GANG];
    char *to[MAX_GANG];
} lane;

static void lane_start(lane *l, const copy_entry *e, int gang, const uintptr_t *sources, const uintptr_t *targets,
                       int64_t row)
{
    for (int g = 0; g < gang; g++) {
        l->from[g] = (const char *)sources[e[g].source] + e[g].source_offset;
        l->to[g] = (char *)targets[e[g].target] + e[g].target_offset;
    }
    for (int64_t d = e->ndim - 1; d >= 0; d--) {
        l->at[d] = row % e->shape[d];
        row /= e->shape[d];
        for (int g = 0; g < gang; g++) {
            l->from[g] += l->at[d] * e[g].source_stride[d];
            l->to[g] += l->at[d] * e[g].target_stride[d];
        }
    }
}

static void lane_step(lane *l, const copy_entry *e, int gang)
{
    for (int64_t d = e->ndim - 1; d >= 0; d--) {
        int64_t back = ++l->at[d] < e->shape[d] ? 0 : e->shape[d];
        for (int g = 0; g < gang; g++) {
            l->from[g] += e[g].source_stride[d] * (1 - back);
            l->to[g] += e[g].target_stride[d] * (1 - back);
        }
        if (back == 0)
            return;
        l->at[d] = 0;
    }
}

/* Piece `j` of `pieces` of one row of every member; borders lie at whole cache lines of the target. */
static void copy_piece(const lane *l, int gang, int64_t run, int64_t j, int64_t pieces, int streaming)
{
    for (int g = 0; g < gang; g++) {
        int64_t shift = -(int64_t)(uintptr_t)l->to[g] & (LINE - 1);
        int64_t low = j == 0 ? 0 : j * PIECE + shift;
        int64_t high = j == pieces - 1 ? run : (j + 1) * PIECE + shift;
        copy_run(l->to[g] + low, l->from[g] + low, high - low, streaming);
    }
}

/* Rows of an entry and the members of its gang. Short rows go one after the other, so that a line of the target
 * that two of them share is written while it is at hand. */
static void copy_rows(const copy_entry *e, int gang, const uintptr_t *sources, const uintptr_t *targets,
                      int streaming)
{
    int64_t rows = 1, pieces = e->run < 2 * PIECE + LINE ? 1 : (e->run - LINE) / PIECE;
    for (int64_t d = 0; d < e->ndim; d++)
        rows *= e->shape[d];
    if (rows <= 0 || e->run <= 0)
        return;
    int lanes = rows >= LANES && e->run >= PIECE / 2 ? LANES : 1;
    int64_t each = rows / lanes;
    lane at[LANES];
    for (int k = 0; k < lanes; k++)
        lane_start(&at[k], e, gang, sources, targets, k * each);
    for (int64_t i = 0; i < each; i++) {
        int64_t turns = lanes == 1 ? LANES : 1, stretch = pieces / turns;
        for (int64_t j = 0; j < stretch; j++)
            for (int k = 0; k < lanes; k++)
                for (int64_t t = 0; t < turns; t++)
                    copy_piece(&at[k], gang, e->run, t * stretch + j, pieces, streaming);
        for (int64_t j = turns * stretch; j < pieces; j++)
            for (int k = 0; k < lanes; k++)
                copy_piece(&at[k], gang, e->run, j, pieces, streaming);
        for (int k = 0; k < lanes; k++)
            lane_step(&at[k], e, gang);
    }
    for (int64_t i = lanes * each; i < rows; i++) {
        lane_start(&at[0], e, gang, sources, targets, i);
        for (int64_t j = 0; j < pieces; j++)
            copy_piece(&at[0], gang, e->run, j, pieces, streaming);
    }
}

/* One element of 1, 2, 4, 8 or 16 bytes per index: the two inner axes in tiles, the others by an odometer. */
static void copy_elements(const copy_entry *e, char *to, const char *from)
{
    int64_t d = e->ndim, n = d > 1 ? e->shape[d - 2] : 1, m = d > 0 ? e->shape[d - 1] : 1;
    int64_t to_n = d > 1 ? e->target_stride[d - 2] : 0, from_n = d > 1 ? e->source_stride[d - 2] : 0;
    int64_t to_m = d > 0 ? e->target_stride[d - 1] : 0, from_m = d > 0 ? e->source_stride[d - 1] : 0;
    int64_t at[MAX_DIMS] = {0};
    for (;;) {
        switch (e->run) {
        case 1:
            tiles_1(to, from, n, m, to_n, from_n, to_m, from_m);
            break;
        case 2:
            tiles_2(to, from, n, m, to_n, from_n, to_m, from_m);
            break;
        case 4:
            tiles_4(to, from, n, m, to_n, from_n, to_m, from_m);
            break;
        case 8:
            tiles_8(to, from, n, m, to_n, from_n, to_m, from_m);
            break;
        default:
            tiles_16(to, from, n, m, to_n, from_n, to_m, from_m);
        }
        for (d = e->ndim - 3; d >= 0; d--) {
            from += e->source_stride[d];
            to += e->target_stride[d];
            if (++at[d] < e->shape[d])
                break;
            from -= e->source_stride[d] * e->shape[d];
            to -= e->target_stride[d] * e->shape[d];
            at[d] = 0;
        }
        if (d < 0)
            return;
    }
}

typedef struct {
    const copy_entry *entries;
    const uintptr_t *sources, *targets;
    int streaming;
} copy_job;

static void copy_one(void *state, int64_t index)
{
    const copy_job *job = state;
    const copy_entry *e = &job->entries[index];
    int64_t run = e->run;
    if (e->gang == 0)
        return; /* its leader copies it */
    if (run == 1 || run == 2 || run == 4 || run == 8 || run == 16)
        for (int64_t g = 0; g < e->gang; g++)
            copy_elements(&e[g], (char *)job->targets[e[g].target] + e[g].target_offset,
                          (const char *)job->sources[e[g].source] + e[g].source_offset);
    else
        copy_rows(e, (int)e->gang, job->sources, job->targets, job->streaming);
    finish_streaming(job->streaming);
}

void run_copies(const copy_entry *entries, int64_t count, const uintptr_t *sources, const uintptr_t *targets,
                int threads, int streaming)
{
    copy_job job = {entries, sources, targets, streaming && has_avx2()};
    parallel_for(copy_one, &job, count, threads);
}

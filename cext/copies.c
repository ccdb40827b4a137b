/* Strided copies. Long rows go out by streaming stores, which spare the read of the destination line; two
 * crossed strides (a transpose) are walked in square tiles, so that each cache line is used whole. Rows that lie
 * side by side in one source buffer form a gang and are copied together: reads are then long, and only writes
 * are short, which costs streaming stores nothing. A long run is copied at several places in turns. */
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
#define LANES 4              /* places of one long run that are copied in turns */
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
    if (head > 0)
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
    if (i < n)
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

/* Piece `j` of `pieces` of one row of every member; borders lie at whole cache lines of the target. */
static void copy_piece(char *const *to, const char *const *from, int gang, int64_t run, int64_t j, int64_t pieces,
                       int streaming)
{
    for (int g = 0; g < gang; g++) {
        int64_t shift = -(int64_t)(uintptr_t)to[g] & (LINE - 1);
        int64_t low = j == 0 ? 0 : j * PIECE + shift;
        int64_t high = j == pieces - 1 ? run : (j + 1) * PIECE + shift;
        copy_run(to[g] + low, from[g] + low, high - low, streaming);
    }
}

/* One long run of every member, at LANES places in turns. */
static void copy_in_turns(char *const *to, const char *const *from, int gang, int64_t run, int streaming)
{
    int64_t pieces = run < LANES * PIECE + LINE ? 1 : (run - LINE) / PIECE, stretch = pieces / LANES;
    for (int64_t i = 0; i < stretch; i++)
        for (int64_t k = 0; k < LANES; k++)
            copy_piece(to, from, gang, run, k * stretch + i, pieces, streaming);
    for (int64_t j = LANES * stretch; j < pieces; j++)
        copy_piece(to, from, gang, run, j, pieces, streaming);
}

/* The rows of an entry and of the members of its gang, one after the other: a line of a target that two rows
 * share is written while it is at hand. */
static void copy_rows(const copy_entry *e, int gang, const uintptr_t *sources, const uintptr_t *targets,
                      int streaming)
{
    const char *from[MAX_GANG];
    char *to[MAX_GANG];
    int64_t at[MAX_DIMS] = {0}, d;
    for (int g = 0; g < gang; g++) {
        from[g] = (const char *)sources[e[g].source] + e[g].source_offset;
        to[g] = (char *)targets[e[g].target] + e[g].target_offset;
    }
    if (e->ndim == 0) {
        copy_in_turns(to, from, gang, e->run, streaming);
        return;
    }
    do {
        for (int g = 0; g < gang; g++)
            copy_run(to[g], from[g], e->run, streaming);
        for (d = e->ndim - 1; d >= 0; d--) {
            int64_t back = ++at[d] < e->shape[d] ? 0 : e->shape[d];
            for (int g = 0; g < gang; g++) {
                from[g] += e[g].source_stride[d] * (1 - back);
                to[g] += e[g].target_stride[d] * (1 - back);
            }
            if (back == 0)
                break;
            at[d] = 0;
        }
    } while (d >= 0);
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
    for (int64_t d = 0; d < e->ndim; d++)
        if (e->shape[d] <= 0)
            return;
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

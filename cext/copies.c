/* Strided copies. Long rows go out by streaming stores, which spare the read of the destination line; two
 * crossed strides (a transpose) are walked in square tiles, so that each cache line is used whole. */
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

static void copy_row(char *to, const char *from, int64_t n, int streaming)
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

static void copy_plane(const copy_entry *e, char *to, const char *from, int streaming)
{
    int64_t d = e->ndim, n = d > 1 ? e->shape[d - 2] : 1, m = d > 0 ? e->shape[d - 1] : 1;
    int64_t to_n = d > 1 ? e->target_stride[d - 2] : 0, from_n = d > 1 ? e->source_stride[d - 2] : 0;
    int64_t to_m = d > 0 ? e->target_stride[d - 1] : 0, from_m = d > 0 ? e->source_stride[d - 1] : 0;
    switch (e->run) {
    case 1:
        tiles_1(to, from, n, m, to_n, from_n, to_m, from_m);
        return;
    case 2:
        tiles_2(to, from, n, m, to_n, from_n, to_m, from_m);
        return;
    case 4:
        tiles_4(to, from, n, m, to_n, from_n, to_m, from_m);
        return;
    case 8:
        tiles_8(to, from, n, m, to_n, from_n, to_m, from_m);
        return;
    case 16:
        tiles_16(to, from, n, m, to_n, from_n, to_m, from_m);
        return;
    default:
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < m; j++)
                copy_row(to + i * to_n + j * to_m, from + i * from_n + j * from_m, e->run, streaming);
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
    const char *from = (const char *)job->sources[e->source] + e->source_offset;
    char *to = (char *)job->targets[e->target] + e->target_offset;
    int64_t at[MAX_DIMS] = {0};
    for (;;) {
        copy_plane(e, to, from, job->streaming);
        int64_t d = e->ndim - 3;
        for (; d >= 0; d--) {
            from += e->source_stride[d];
            to += e->target_stride[d];
            if (++at[d] < e->shape[d])
                break;
            from -= e->source_stride[d] * e->shape[d];
            to -= e->target_stride[d] * e->shape[d];
            at[d] = 0;
        }
        if (d < 0)
            break;
    }
#if HAVE_X86
    if (job->streaming)
        _mm_sfence();
#endif
}

void run_copies(const copy_entry *entries, int64_t count, const uintptr_t *sources, const uintptr_t *targets,
                int threads, int streaming)
{
    copy_job job = {entries, sources, targets, streaming && has_avx2()};
    parallel_for(copy_one, &job, count, threads);
}

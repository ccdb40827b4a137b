/* Compare and compaction. A buffer is cut into blocks; a thread compacts a block into its own work space and then
 * commits it in block order, so the result is dense and sorted whatever the number of threads. */
#include "delta.h"
#include "kernels.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_X86 1
#else
#define HAVE_X86 0
#endif

#define BLOCK 32768 /* elements; a multiple of 32 */

/* Changed elements of up to 32 at `i`, one bit each. */
#define DEFINE_WORD(SUFFIX, TYPE)                                                                              \
    static inline uint32_t word_##SUFFIX(const char *old, const char *new, int64_t i, int64_t n)               \
    {                                                                                                          \
        uint32_t word = 0;                                                                                     \
        if (n == 32 && memcmp(old + i * (int64_t)sizeof(TYPE), new + i * (int64_t)sizeof(TYPE),                \
                              32 * sizeof(TYPE)) == 0)                                                         \
            return 0;                                                                                          \
        for (int64_t j = 0; j < n; j++) {                                                                      \
            TYPE a, b;                                                                                         \
            memcpy(&a, old + (i + j) * (int64_t)sizeof(TYPE), sizeof(TYPE));                                   \
            memcpy(&b, new + (i + j) * (int64_t)sizeof(TYPE), sizeof(TYPE));                                   \
            word |= (uint32_t)(a != b) << j;                                                                   \
        }                                                                                                      \
        return word;                                                                                           \
    }

DEFINE_WORD(1, uint8_t)
DEFINE_WORD(2, uint16_t)
DEFINE_WORD(4, uint32_t)

#if HAVE_X86
#define AVX2 __attribute__((target("avx2,bmi")))
#define LOAD(p, k) _mm256_loadu_si256((const __m256i *)((p) + 32 * (k)))

AVX2 static inline uint32_t fast_1(const char *old, const char *new)
{
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(LOAD(old, 0), LOAD(new, 0)));
}

AVX2 static inline uint32_t fast_2(const char *old, const char *new)
{
    __m256i a = _mm256_cmpeq_epi16(LOAD(old, 0), LOAD(new, 0)), b = _mm256_cmpeq_epi16(LOAD(old, 1), LOAD(new, 1));
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xD8));
}

AVX2 static inline uint32_t fast_4(const char *old, const char *new)
{
    uint32_t word = 0;
    for (int k = 0; k < 4; k++) {
        __m256i same = _mm256_cmpeq_epi32(LOAD(old, k), LOAD(new, k));
        word |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(same)) << (8 * k);
    }
    return ~word;
}
#endif

/* Where a block's entries go: a thread's work space, or the streams of the result. */
typedef struct {
    uint32_t *positions;
    char *new, *old; /* `old` may be NULL; with a mask `new` too */
} entries;

#define DEFINE_SCAN(NAME, TYPE, TARGET, WORD)                                                                  \
    TARGET static int64_t NAME(const char *old, const char *new, int64_t begin, int64_t end, entries out)      \
    {                                                                                                          \
        int64_t k = 0;                                                                                         \
        TYPE *new_out = (TYPE *)out.new, *old_out = (TYPE *)out.old;                                           \
        for (int64_t i = begin; i < end; i += 32) {                                                            \
            int64_t n = end - i < 32 ? end - i : 32;                                                           \
            uint32_t word = WORD;                                                                              \
            for (; word; word &= word - 1, k++) {                                                              \
                int64_t at = i + __builtin_ctz(word);                                                          \
                out.positions[k] = (uint32_t)at;                                                               \
                memcpy(&new_out[k], new + at * (int64_t)sizeof(TYPE), sizeof(TYPE));                           \
                if (old_out)                                                                                   \
                    memcpy(&old_out[k], old + at * (int64_t)sizeof(TYPE), sizeof(TYPE));                       \
            }                                                                                                  \
        }                                                                                                      \
        return k;                                                                                              \
    }

DEFINE_SCAN(scan_1, uint8_t, , word_1(old, new, i, n))
DEFINE_SCAN(scan_2, uint16_t, , word_2(old, new, i, n))
DEFINE_SCAN(scan_4, uint32_t, , word_4(old, new, i, n))
#if HAVE_X86
DEFINE_SCAN(scan_fast_1, uint8_t, AVX2, n == 32 ? fast_1(old + i, new + i) : word_1(old, new, i, n))
DEFINE_SCAN(scan_fast_2, uint16_t, AVX2, n == 32 ? fast_2(old + 2 * i, new + 2 * i) : word_2(old, new, i, n))
DEFINE_SCAN(scan_fast_4, uint32_t, AVX2, n == 32 ? fast_4(old + 4 * i, new + 4 * i) : word_4(old, new, i, n))
#endif

typedef int64_t scan_function(const char *old, const char *new, int64_t begin, int64_t end, entries out);

static scan_function *scan_for(int itemsize)
{
#if HAVE_X86
    if (has_avx2())
        return itemsize == 1 ? scan_fast_1 : itemsize == 2 ? scan_fast_2 : scan_fast_4;
#endif
    return itemsize == 1 ? scan_1 : itemsize == 2 ? scan_2 : scan_4;
}

/* Entries that a mask names. Bits past the end are no elements and are left out. */
static int64_t scan_mask(const uint32_t *words, const char *new, int itemsize, int64_t begin, int64_t end, entries out)
{
    int64_t k = 0;
    for (int64_t i = begin; i < end; i += 32) {
        uint32_t word = words[i / 32];
        if (end - i < 32)
            word &= (1u << (end - i)) - 1;
        for (; word; word &= word - 1, k++) {
            int64_t at = i + __builtin_ctz(word);
            out.positions[k] = (uint32_t)at;
            if (new)
                memcpy(out.new + k * itemsize, new + at * itemsize, (size_t)itemsize);
        }
    }
    return k;
}

/* Blocks in order: `next` is taken by threads, `committed` counts those whose entries have their place. */
typedef struct {
    int64_t next, committed, blocks;
} turns;

static int64_t take_turn(turns *t)
{
    int64_t block = __atomic_fetch_add(&t->next, 1, __ATOMIC_RELAXED);
    return block < t->blocks ? block : -1;
}

static void wait_turn(turns *t, int64_t block)
{
    for (int spins = 0; __atomic_load_n(&t->committed, __ATOMIC_ACQUIRE) != block; spins++)
        if (spins > 256)
            sched_yield();
}

static void end_turn(turns *t, int64_t block)
{
    __atomic_store_n(&t->committed, block + 1, __ATOMIC_RELEASE);
}

typedef struct {
    turns turns;
    const char *old, *new;
    const uint32_t *mask;
    int64_t n, count, room;
    int itemsize;
    entries out;
} compaction;

static int64_t scan_block(const compaction *c, int64_t begin, int64_t end, entries out)
{
    if (c->mask)
        return scan_mask(c->mask, c->new, c->itemsize, begin, end, out);
    return scan_for(c->itemsize)(c->old, c->new, begin, end, out);
}

static void store_entries(const compaction *c, int64_t offset, int64_t found, entries from)
{
    int64_t n = c->room - offset < found ? c->room - offset : found;
    if (n <= 0)
        return;
    memcpy(c->out.positions + offset, from.positions, (size_t)n * sizeof(uint32_t));
    if (c->out.new)
        memcpy(c->out.new + offset * c->itemsize, from.new, (size_t)(n * c->itemsize));
    if (c->out.old)
        memcpy(c->out.old + offset * c->itemsize, from.old, (size_t)(n * c->itemsize));
}

static void compact_blocks(void *state, int64_t thread)
{
    (void)thread;
    compaction *c = state;
    char *space = malloc(BLOCK * (sizeof(uint32_t) + 2 * (size_t)c->itemsize));
    if (!space)
        return; /* the other threads do this one's share */
    entries mine = {(uint32_t *)space, space + BLOCK * sizeof(uint32_t), NULL};
    if (c->out.old)
        mine.old = mine.new + BLOCK * (size_t)c->itemsize;
    for (int64_t block; (block = take_turn(&c->turns)) >= 0;) {
        int64_t begin = block * BLOCK, end = begin + BLOCK < c->n ? begin + BLOCK : c->n;
        int64_t found = scan_block(c, begin, end, mine);
        wait_turn(&c->turns, block);
        int64_t offset = c->count;
        c->count += found;
        end_turn(&c->turns, block);
        store_entries(c, offset, found, mine);
    }
    free(space);
}

static int64_t run_compaction(compaction *c, int threads)
{
    c->turns.blocks = (c->n + BLOCK - 1) / BLOCK;
    parallel_for(compact_blocks, c, threads > 1 ? threads : 1, threads);
    return c->turns.committed == c->turns.blocks ? c->count : REFUSED_MEMORY;
}

int64_t delta_compare(const void *old, const void *new, int64_t n, int itemsize, uint32_t *positions, void *new_out,
                      void *old_out, int64_t room, int threads)
{
    compaction c = {.old = old, .new = new, .n = n, .room = room, .itemsize = itemsize};
    c.out = (entries){positions, new_out, old_out};
    return run_compaction(&c, threads);
}

int64_t delta_mask(const uint32_t *words, const void *new, int64_t n, int itemsize, uint32_t *positions,
                   void *new_out, int64_t room, int threads)
{
    compaction c = {.mask = words, .new = new, .n = n, .room = room, .itemsize = itemsize};
    c.out = (entries){positions, new ? new_out : NULL, NULL};
    return run_compaction(&c, threads);
}

/* The fused form: a block's gaps and values are coded in the work space; only the gap of its first entry waits
 * for the block before. */
typedef struct {
    turns turns;
    const char *old, *new;
    int64_t n;
    int itemsize, kind;
    uint8_t *gaps;
    char *values, *escapes;
    int64_t gap_room, value_room, escape_room;
    uint64_t next; /* one past the last entry so far */
    fused_size size;
} fusion;

typedef struct {
    entries found;
    uint8_t *gaps;
    char *values, *escapes;
} fused_space;

static int64_t code_gaps(const uint32_t *positions, int64_t count, uint8_t *out)
{
    uint8_t *start = out;
    for (int64_t i = 1; i < count; i++) {
        uint32_t gap = positions[i] - positions[i - 1] - 1;
        for (; gap >= 255; gap -= 255)
            *out++ = 255;
        *out++ = (uint8_t)gap;
    }
    return out - start;
}

/* Codes the values of a block; returns the number of escapes. */
static int64_t code_values(const fusion *f, int64_t count, const fused_space *space)
{
    const char *new = space->found.new, *old = space->found.old;
    if (f->kind == VALUES_ULP)
        return ulp_encode(new, old, count, f->itemsize, (uint8_t *)space->values, space->escapes, count);
    memcpy(space->values, new, (size_t)(count * f->itemsize));
    if (f->kind == VALUES_XOR)
        for (int64_t i = 0; i < count * f->itemsize; i++)
            space->values[i] ^= old[i];
    return 0;
}

static void store_stream(char *to, int64_t room, int64_t offset, const char *from, int64_t count, int64_t size)
{
    int64_t n = room - offset < count ? room - offset : count;
    if (n > 0)
        memcpy(to + offset * size, from, (size_t)(n * size));
}

static int64_t store_gap(const fusion *f, int64_t at, uint64_t gap)
{
    int64_t start = at;
    for (; gap >= 255; gap -= 255, at++)
        if (at < f->gap_room)
            f->gaps[at] = 255;
    if (at < f->gap_room)
        f->gaps[at] = (uint8_t)gap;
    return at + 1 - start;
}

static void fuse_block(fusion *f, int64_t block, const fused_space *space)
{
    int64_t begin = block * BLOCK, end = begin + BLOCK < f->n ? begin + BLOCK : f->n;
    int64_t count = scan_for(f->itemsize)(f->old, f->new, begin, end, space->found);
    int64_t gap_bytes = code_gaps(space->found.positions, count, space->gaps);
    int64_t escapes = code_values(f, count, space);
    wait_turn(&f->turns, block);
    fused_size at = f->size;
    if (count) {
        at.gap_bytes += store_gap(f, at.gap_bytes, space->found.positions[0] - f->next);
        f->next = (uint64_t)space->found.positions[count - 1] + 1;
        f->size = (fused_size){at.count + count, at.gap_bytes + gap_bytes, at.escapes + escapes};
    }
    end_turn(&f->turns, block);
    int64_t value_size = f->kind == VALUES_ULP ? 1 : f->itemsize;
    store_stream((char *)f->gaps, f->gap_room, at.gap_bytes, (char *)space->gaps, gap_bytes, 1);
    store_stream(f->values, f->value_room, at.count, space->values, count, value_size);
    store_stream(f->escapes, f->escape_room, at.escapes, space->escapes, escapes, f->itemsize);
}

static void fuse_blocks(void *state, int64_t thread)
{
    (void)thread;
    fusion *f = state;
    size_t item = (size_t)f->itemsize;
    char *memory = malloc(BLOCK * (sizeof(uint32_t) + 4 * item + 1));
    if (!memory)
        return;
    char *rest = memory + BLOCK * (sizeof(uint32_t) + 2 * item);
    fused_space space = {
        .found = {(uint32_t *)memory, memory + BLOCK * sizeof(uint32_t), memory + BLOCK * (sizeof(uint32_t) + item)},
        .values = rest,
        .escapes = rest + BLOCK * item,
        .gaps = (uint8_t *)rest + 2 * BLOCK * item,
    };
    for (int64_t block; (block = take_turn(&f->turns)) >= 0;)
        fuse_block(f, block, &space);
    free(memory);
}

int delta_fused(const void *old, const void *new, int64_t n, int itemsize, int kind, uint8_t *gaps, int64_t gap_room,
                void *values, int64_t value_room, void *escapes, int64_t escape_room, int threads, fused_size *size)
{
    fusion f = {.old = old, .new = new, .n = n, .itemsize = itemsize, .kind = kind};
    f.gaps = gaps, f.values = values, f.escapes = escapes;
    f.gap_room = gap_room, f.value_room = value_room, f.escape_room = escape_room;
    f.turns.blocks = (n + BLOCK - 1) / BLOCK;
    parallel_for(fuse_blocks, &f, threads > 1 ? threads : 1, threads);
    *size = f.size;
    return f.turns.committed == f.turns.blocks ? 0 : REFUSED_MEMORY;
}

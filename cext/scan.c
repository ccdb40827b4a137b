/* Comparison of 32 elements at a time: a word of changed bits, then one entry per set bit. */
#include "scan.h"

#include "kernels.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_X86 1
#else
#define HAVE_X86 0
#endif

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

#define DEFINE_SCAN(SUFFIX, TYPE)                                                                              \
    static int64_t scan_##SUFFIX(const char *old, const char *new, int64_t begin, int64_t end, entries out)    \
    {                                                                                                          \
        int64_t k = 0;                                                                                         \
        TYPE *new_out = (TYPE *)out.new, *old_out = (TYPE *)out.old;                                           \
        for (int64_t i = begin; i < end; i += 32) {                                                            \
            int64_t n = end - i < 32 ? end - i : 32;                                                           \
            uint32_t word = word_##SUFFIX(old, new, i, n);                                                     \
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

DEFINE_SCAN(1, uint8_t)
DEFINE_SCAN(2, uint16_t)
DEFINE_SCAN(4, uint32_t)

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

/* One changed element in a hundred is one word in four with an entry: a branch on it would be guessed wrong more
 * often than any other. So the first entry is written always and counted if there is one; more are rare. */
#define PUT_ENTRY(TYPE)                                                                                        \
    do {                                                                                                       \
        uint32_t bit = _tzcnt_u32(word); /* 32 where no bit is set */                                          \
        int64_t from = (i + (bit & 31)) * (int64_t)sizeof(TYPE);                                               \
        out.positions[k] = (uint32_t)i + bit;                                                                  \
        memcpy(&new_out[k], new + from, sizeof(TYPE));                                                         \
        if (old_out)                                                                                           \
            memcpy(&old_out[k], old + from, sizeof(TYPE));                                                     \
        k += word != 0;                                                                                        \
        word &= word - 1;                                                                                      \
    } while (0)

#define DEFINE_FAST(SUFFIX, TYPE)                                                                              \
    AVX2 static int64_t scan_fast_##SUFFIX(const char *old, const char *new, int64_t begin, int64_t end,       \
                                           entries out)                                                        \
    {                                                                                                          \
        int64_t k = 0, i = begin;                                                                              \
        TYPE *new_out = (TYPE *)out.new, *old_out = (TYPE *)out.old;                                           \
        for (; end - i >= 32; i += 32) {                                                                       \
            uint32_t word = fast_##SUFFIX(old + i * (int64_t)sizeof(TYPE), new + i * (int64_t)sizeof(TYPE));   \
            PUT_ENTRY(TYPE);                                                                                   \
            while (word)                                                                                       \
                PUT_ENTRY(TYPE);                                                                               \
        }                                                                                                      \
        out.positions += k, out.new = (char *)(new_out + k), out.old = old_out ? (char *)(old_out + k) : NULL; \
        return k + scan_##SUFFIX(old, new, i, end, out);                                                       \
    }

DEFINE_FAST(1, uint8_t)
DEFINE_FAST(2, uint16_t)
DEFINE_FAST(4, uint32_t)
#endif

int64_t scan_changed(const char *old, const char *new, int itemsize, int64_t begin, int64_t end, entries out)
{
#if HAVE_X86
    if (has_avx2())
        return itemsize == 1   ? scan_fast_1(old, new, begin, end, out)
               : itemsize == 2 ? scan_fast_2(old, new, begin, end, out)
                               : scan_fast_4(old, new, begin, end, out);
#endif
    return itemsize == 1   ? scan_1(old, new, begin, end, out)
           : itemsize == 2 ? scan_2(old, new, begin, end, out)
                           : scan_4(old, new, begin, end, out);
}

/* Entries that a mask names. Bits past the end are no elements and are left out. */
int64_t scan_mask(const uint32_t *words, const char *new, int itemsize, int64_t begin, int64_t end, entries out)
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

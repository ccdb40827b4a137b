/* Codings of positions (gaps in bytes or 16-bit words, Rice) and of values (distances in the order of floats).
 * Every decoder takes any bytes: it checks before it writes, and refuses what no encoder would have written. */
#include "delta.h"

#include <string.h>

#if defined(FAST) /* empty for gcc -fanalyzer, which doesn't see through the choice of a clone */
#elif defined(__x86_64__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

const char *delta_refusal(int64_t code)
{
    switch (code) {
    case REFUSED_SHORT:
        return "the stream ends inside of an entry";
    case REFUSED_LONG:
        return "the stream goes on after its last entry";
    case REFUSED_RANGE:
        return "a position lies past the end of the buffer";
    case REFUSED_ORDER:
        return "positions do not ascend";
    case REFUSED_MEMORY:
        return "no memory for the work space";
    default:
        return "the stream has bits that no encoder writes";
    }
}

/* Entries plus carries, or REFUSED_ORDER. */
#define DEFINE_GAPS(NAME, TYPE, CARRY)                                                                         \
    FAST static int64_t NAME##_size(const uint32_t *positions, int64_t count)                                  \
    {                                                                                                          \
        uint64_t size = (uint64_t)count + positions[0] / CARRY;                                                \
        uint32_t wrong = 0;                                                                                    \
        for (int64_t i = 1; i < count; i++) {                                                                  \
            wrong |= positions[i] <= positions[i - 1];                                                         \
            size += (positions[i] - positions[i - 1] - 1) / CARRY;                                             \
        }                                                                                                      \
        return wrong ? REFUSED_ORDER : (int64_t)size;                                                          \
    }                                                                                                          \
    static TYPE *NAME##_put(TYPE *out, uint32_t gap)                                                           \
    {                                                                                                          \
        for (; gap >= CARRY; gap -= CARRY)                                                                     \
            *out++ = CARRY;                                                                                    \
        *out++ = (TYPE)gap;                                                                                    \
        return out;                                                                                            \
    }                                                                                                          \
    int64_t gaps_encode_##NAME(const uint32_t *positions, int64_t count, TYPE *out, int64_t room)              \
    {                                                                                                          \
        int64_t size = count ? NAME##_size(positions, count) : 0;                                              \
        if (size < 0 || size > room || count == 0)                                                             \
            return size;                                                                                       \
        out = NAME##_put(out, positions[0]);                                                                   \
        for (int64_t i = 1; i < count; i++)                                                                    \
            out = NAME##_put(out, positions[i] - positions[i - 1] - 1);                                        \
        return size;                                                                                           \
    }                                                                                                          \
    int64_t gaps_decode_##NAME(const TYPE *data, int64_t size, uint64_t elements, uint32_t *positions,         \
                               int64_t count)                                                                  \
    {                                                                                                          \
        uint64_t at = 0; /* one past the last entry, plus the carries since */                                 \
        int64_t i = 0, k = 0;                                                                                  \
        for (; i < size; i++) {                                                                                \
            at += data[i];                                                                                     \
            if (data[i] == CARRY)                                                                              \
                continue;                                                                                      \
            if (k == count)                                                                                    \
                return REFUSED_LONG;                                                                           \
            if (at >= elements)                                                                                \
                return REFUSED_RANGE;                                                                          \
            positions[k++] = (uint32_t)at++;                                                                   \
        }                                                                                                      \
        if (k < count)                                                                                         \
            return REFUSED_SHORT;                                                                              \
        return size && data[size - 1] == CARRY ? REFUSED_LONG : 0;                                             \
    }

DEFINE_GAPS(u8, uint8_t, 255u)
DEFINE_GAPS(u16, uint16_t, 65535u)

/* Bits go out lowest first; at most 32 at a time, so that the accumulator never overflows. */
typedef struct {
    uint8_t *out;
    uint64_t bits;
    int held;
} bit_writer;

static void put_bits(bit_writer *w, uint64_t bits, int count)
{
    w->bits |= bits << w->held;
    w->held += count;
    if (w->held >= 32) {
        uint32_t word = (uint32_t)w->bits;
        memcpy(w->out, &word, 4);
        w->out += 4;
        w->bits >>= 32;
        w->held -= 32;
    }
}

static void put_rice(bit_writer *w, uint32_t gap, int parameter)
{
    uint32_t ones = gap >> parameter;
    for (; ones >= 31; ones -= 31)
        put_bits(w, 0x7FFFFFFFu, 31);
    put_bits(w, (1u << ones) - 1, (int)ones + 1);
    put_bits(w, gap & ((1u << parameter) - 1), parameter);
}

int64_t rice_encode(const uint32_t *positions, int64_t count, int parameter, uint8_t *out, int64_t room)
{
    uint64_t bits = 0;
    uint32_t last = UINT32_MAX;
    for (int64_t i = 0; i < count; i++) {
        if (i && positions[i] <= last)
            return REFUSED_ORDER;
        bits += ((positions[i] - last - 1) >> parameter) + 1u + (unsigned)parameter;
        last = positions[i];
    }
    int64_t size = (int64_t)((bits + 7) / 8);
    if (size > room)
        return size;
    bit_writer w = {.out = out};
    last = UINT32_MAX;
    for (int64_t i = 0; i < count; i++) {
        put_rice(&w, positions[i] - last - 1, parameter);
        last = positions[i];
    }
    for (; w.held > 0; w.held -= 8, w.bits >>= 8)
        *w.out++ = (uint8_t)w.bits;
    return size;
}

typedef struct {
    const uint8_t *data;
    int64_t size, at; /* bytes; `at`: the next one to take in */
    uint64_t bits;
    int held;
} bit_reader;

static inline void refill(bit_reader *r)
{
    if (r->at + 8 <= r->size && r->held <= 32) {
        uint32_t word;
        memcpy(&word, r->data + r->at, 4);
        r->bits |= (uint64_t)word << r->held;
        r->held += 32;
        r->at += 4;
        return;
    }
    while (r->held <= 56 && r->at < r->size) {
        r->bits |= (uint64_t)r->data[r->at++] << r->held;
        r->held += 8;
    }
}

static inline void drop_bits(bit_reader *r, int count)
{
    r->bits = count < 64 ? r->bits >> count : 0;
    r->held -= count;
}

/* One gap, or a refusal. A gap that reaches `elements` is refused while its unary part is still being read. */
static int64_t take_rice(bit_reader *r, int parameter, uint64_t elements)
{
    uint64_t ones = 0;
    for (;;) {
        refill(r);
        if (r->held == 0)
            return REFUSED_SHORT;
        int run = ~r->bits ? __builtin_ctzll(~r->bits) : 64;
        if (run < r->held) {
            ones += (unsigned)run;
            drop_bits(r, run + 1);
            break;
        }
        ones += (unsigned)r->held;
        r->bits = 0;
        r->held = 0;
        if (ones << parameter >= elements)
            return REFUSED_RANGE;
    }
    refill(r);
    if (r->held < parameter)
        return REFUSED_SHORT;
    uint64_t low = r->bits & ((1u << parameter) - 1);
    drop_bits(r, parameter);
    return (int64_t)(ones << parameter | low);
}

int64_t rice_decode(const uint8_t *data, int64_t size, int parameter, uint64_t elements, uint32_t *positions,
                    int64_t count)
{
    bit_reader r = {.data = data, .size = size};
    uint64_t next = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t gap = take_rice(&r, parameter, elements);
        if (gap < 0)
            return gap;
        if (next + (uint64_t)gap >= elements)
            return REFUSED_RANGE;
        positions[i] = (uint32_t)(next + (uint64_t)gap);
        next += (uint64_t)gap + 1;
    }
    refill(&r);
    if (r.at < size || r.held >= 8)
        return REFUSED_LONG;
    return r.bits ? REFUSED_FORM : 0;
}

#define DEFINE_VALUES(SUFFIX, TYPE)                                                                            \
    FAST static void zigzag_##SUFFIX(const TYPE *new, const TYPE *old, int64_t count, TYPE *codes)             \
    {                                                                                                          \
        for (int64_t i = 0; i < count; i++) {                                                                  \
            TYPE d = (TYPE)(ORDERED(TYPE, new[i]) - ORDERED(TYPE, old[i]));                                    \
            codes[i] = ZIGZAG(TYPE, d);                                                                        \
        }                                                                                                      \
    }                                                                                                          \
    FAST static void unzigzag_##SUFFIX(const TYPE *codes, const TYPE *old, int64_t count, TYPE *new)           \
    {                                                                                                          \
        for (int64_t i = 0; i < count; i++) {                                                                  \
            TYPE v = (TYPE)(ORDERED(TYPE, old[i]) + UNZIGZAG(TYPE, codes[i]));                                 \
            new[i] = UNORDERED(TYPE, v);                                                                       \
        }                                                                                                      \
    }                                                                                                          \
    static int64_t ulp_bytes_##SUFFIX(const TYPE *new, const TYPE *old, int64_t count, uint8_t *codes,         \
                                      TYPE *escapes, int64_t room)                                             \
    {                                                                                                          \
        int64_t k = 0;                                                                                         \
        for (int64_t i = 0; i < count; i++) {                                                                  \
            TYPE d = (TYPE)(ORDERED(TYPE, new[i]) - ORDERED(TYPE, old[i]));                                    \
            TYPE z = ZIGZAG(TYPE, d);                                                                          \
            codes[i] = (uint8_t)(z < 255 ? z : 255);                                                           \
            if (sizeof(TYPE) > 1 && z >= 255) {                                                                \
                if (k < room)                                                                                  \
                    escapes[k] = z;                                                                            \
                k++;                                                                                           \
            }                                                                                                  \
        }                                                                                                      \
        return k;                                                                                              \
    }                                                                                                          \
    static int64_t ulp_values_##SUFFIX(const uint8_t *codes, const TYPE *escapes, int64_t escape_count,        \
                                       const TYPE *old, int64_t count, TYPE *new)                              \
    {                                                                                                          \
        int64_t k = 0;                                                                                         \
        for (int64_t i = 0; i < count; i++) {                                                                  \
            TYPE z = codes[i];                                                                                 \
            if (sizeof(TYPE) > 1 && z == 255) {                                                                \
                if (k == escape_count)                                                                         \
                    return REFUSED_SHORT;                                                                      \
                z = escapes[k++];                                                                              \
                if (z < 255)                                                                                   \
                    return REFUSED_FORM;                                                                       \
            }                                                                                                  \
            TYPE v = (TYPE)(ORDERED(TYPE, old[i]) + UNZIGZAG(TYPE, z));                                        \
            new[i] = UNORDERED(TYPE, v);                                                                       \
        }                                                                                                      \
        return k < escape_count ? REFUSED_LONG : 0;                                                            \
    }

DEFINE_VALUES(1, uint8_t)
DEFINE_VALUES(2, uint16_t)
DEFINE_VALUES(4, uint32_t)

#define BY_SIZE(itemsize, call) ((itemsize) == 1 ? call(1) : (itemsize) == 2 ? call(2) : call(4))

void zigzag_encode(const void *new, const void *old, int64_t count, int itemsize, void *codes)
{
#define CALL(S) zigzag_##S(new, old, count, codes)
    BY_SIZE(itemsize, CALL);
#undef CALL
}

void zigzag_decode(const void *codes, const void *old, int64_t count, int itemsize, void *new)
{
#define CALL(S) unzigzag_##S(codes, old, count, new)
    BY_SIZE(itemsize, CALL);
#undef CALL
}

int64_t ulp_encode(const void *new, const void *old, int64_t count, int itemsize, uint8_t *codes, void *escapes,
                   int64_t room)
{
#define CALL(S) ulp_bytes_##S(new, old, count, codes, escapes, room)
    return BY_SIZE(itemsize, CALL);
#undef CALL
}

int64_t ulp_decode(const uint8_t *codes, const void *escapes, int64_t escape_count, const void *old, int64_t count,
                   int itemsize, void *new)
{
#define CALL(S) ulp_values_##S(codes, escapes, escape_count, old, count, new)
    return BY_SIZE(itemsize, CALL);
#undef CALL
}

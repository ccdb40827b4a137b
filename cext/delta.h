/* Sparse deltas of flat buffers: compare, compaction, gap and value codings, apply. No Python here.
 *
 * A delta of a buffer of n elements (1, 2 or 4 bytes wide, always read as unsigned bits) is a list of strictly
 * ascending positions with the new bits, and, where wanted, the old bits. n is at most 2^32. */
#ifndef JAXRL_DELTA_H
#define JAXRL_DELTA_H

#include <stddef.h>
#include <stdint.h>

enum { VALUES_OVERWRITE = 0, VALUES_XOR = 1, VALUES_ULP = 2 };

/* What a coder refuses; delta_refusal gives the words. */
enum {
    REFUSED_SHORT = -1, /* the stream ends inside of an entry */
    REFUSED_LONG = -2,  /* more entries, or bytes after the last one */
    REFUSED_RANGE = -3, /* a position at or past the end of the buffer */
    REFUSED_ORDER = -4, /* positions that do not ascend */
    REFUSED_FORM = -5,  /* bits that no encoder writes */
    REFUSED_MEMORY = -6 /* no memory for the work space of a thread */
};

#define NO_POSITION UINT32_MAX /* fills positions past the count where a fixed size must be filled */

/* Gaps are p[i] - p[i-1] - 1, p[-1] = -1. Encoders return the true size and write only if it fits in `room`. */
int64_t gaps_encode_u8(const uint32_t *positions, int64_t count, uint8_t *out, int64_t room);
int64_t gaps_encode_u16(const uint32_t *positions, int64_t count, uint16_t *out, int64_t room);
int64_t gaps_decode_u8(const uint8_t *data, int64_t size, uint64_t elements, uint32_t *positions, int64_t count);
int64_t gaps_decode_u16(const uint16_t *data, int64_t size, uint64_t elements, uint32_t *positions, int64_t count);
int64_t rice_encode(const uint32_t *positions, int64_t count, int parameter, uint8_t *out, int64_t room);
int64_t rice_decode(const uint8_t *data, int64_t size, int parameter, uint64_t elements, uint32_t *positions,
                    int64_t count);

/* Signed distance in the order of the floats, zigzag: full width, or bytes with an escape stream. */
void zigzag_encode(const void *new, const void *old, int64_t count, int itemsize, void *codes);
void zigzag_decode(const void *codes, const void *old, int64_t count, int itemsize, void *new);
int64_t ulp_encode(const void *new, const void *old, int64_t count, int itemsize, uint8_t *codes, void *escapes,
                   int64_t room);
int64_t ulp_decode(const uint8_t *codes, const void *escapes, int64_t escape_count, const void *old, int64_t count,
                   int itemsize, void *new);

/* Compares two buffers; returns the true count, stores the first `room` entries. `old_out` may be NULL. */
int64_t delta_compare(const void *old, const void *new, int64_t n, int itemsize, uint32_t *positions, void *new_out,
                      void *old_out, int64_t room, int threads);

/* The same from a mask: bit j of word w says that element 32 w + j changed; `new_out` may be NULL. */
int64_t delta_mask(const uint32_t *words, const void *new, int64_t n, int itemsize, uint32_t *positions,
                   void *new_out, int64_t room, int threads);

typedef struct {
    int64_t count, gap_bytes, escapes;
} fused_size;

/* Compare, u8 gaps and value coding in one pass; sizes are true, each stream is stored as far as it fits. */
int delta_fused(const void *old, const void *new, int64_t n, int itemsize, int kind, uint8_t *gaps,
                int64_t gap_room, void *values, int64_t value_room, void *escapes, int64_t escape_room, int threads,
                fused_size *size);

/* Writes a delta into a buffer; refuses bad positions before the first write. `old_out` may be NULL. */
int64_t delta_apply(void *buffer, int64_t n, int itemsize, const uint32_t *positions, const void *values,
                    int64_t count, int kind, void *old_out, int threads);
int64_t delta_apply_gaps(void *buffer, int64_t n, int itemsize, const uint8_t *gaps, int64_t gap_bytes,
                         const void *values, const void *escapes, int64_t escape_count, int64_t count, int kind,
                         int threads);
int64_t delta_gather(const void *buffer, int64_t n, int itemsize, const uint32_t *positions, int64_t count,
                     void *out);

const char *delta_refusal(int64_t code);

/* Distance of `v` in the order of the floats of its width; and back. */
#define ORDERED(T, v) ((T)((v) ^ ((T)(0 - ((v) >> (8 * sizeof(T) - 1))) | (T)((T)1 << (8 * sizeof(T) - 1)))))
#define UNORDERED(T, v) ((T)((v) ^ ((T)(((v) >> (8 * sizeof(T) - 1)) - 1) | (T)((T)1 << (8 * sizeof(T) - 1)))))
#define ZIGZAG(T, d) ((T)((T)((d) << 1) ^ (T)(0 - ((d) >> (8 * sizeof(T) - 1)))))
#define UNZIGZAG(T, z) ((T)(((z) >> 1) ^ (T)(0 - ((z) & 1))))

#endif

/* Keys of positions in keyed sums: see sums.c. */
#ifndef JAXRL_KEYS_H
#define JAXRL_KEYS_H

#include <stdint.h>

#define HIGH_WORD 0x9E3779B1u /* the upper half of an 8-byte element counts by this odd factor */

static const uint32_t row_seed[2] = {0x243F6A88u, 0x85A308D3u};
static const uint32_t column_seed[2] = {0x13198A2Eu, 0x03707344u};

/* The 32-bit finaliser of MurmurHash3 (public domain, A. Appleby): every input bit reaches every output bit. */
static inline uint32_t mix(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    x ^= x >> 16;
    return x;
}

static inline uint32_t key(int64_t index, uint32_t seed)
{
    return mix((uint32_t)index * 0x9E3779B1u + seed) | 1u;
}

#endif

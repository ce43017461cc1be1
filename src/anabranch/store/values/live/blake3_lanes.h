/* Keyed BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020, section 2) of many short messages at once.
 *
 * A message of 1 to 1,024 bytes is one chunk: its blocks are compressed one after the other, the last one as the root.
 * Lane i of every vector belongs to message i; messages of one call have equally many blocks.
 */
#ifndef BLAKE3_LANES_H
#define BLAKE3_LANES_H
#include <stdint.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors never leave this file */
#if defined(__AVX512F__)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
enum { BLOCK = 64, NAME = 32, MAX_KEY = 1024, MAX_BLOCKS = MAX_KEY / BLOCK, GROUP = 128 };
enum { CHUNK_START = 1, CHUNK_END = 2, ROOT = 8, KEYED_HASH = 16 };

typedef uint32_t lanes_t __attribute__((vector_size(4 * LANES)));
typedef uint8_t block_t __attribute__((vector_size(BLOCK)));

static const uint32_t initial[4] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A};
static const uint8_t place[BLOCK] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

#define ROTATE(x, n) (((x) >> (n)) | ((x) << (32 - (n))))
#define MIX(a, b, c, d, x, y)       \
    do {                            \
        a += b + (x);               \
        d = ROTATE(d ^ a, 16);      \
        c += d;                     \
        b = ROTATE(b ^ c, 12);      \
        a += b + (y);               \
        d = ROTATE(d ^ a, 8);       \
        c += d;                     \
        b = ROTATE(b ^ c, 7);       \
    } while (0)
#define ROUND(m, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, pa, pb, pc, pd, pe, pf) \
    do {                                                                        \
        MIX(s[0], s[4], s[8], s[12], m[p0], m[p1]);                              \
        MIX(s[1], s[5], s[9], s[13], m[p2], m[p3]);                              \
        MIX(s[2], s[6], s[10], s[14], m[p4], m[p5]);                             \
        MIX(s[3], s[7], s[11], s[15], m[p6], m[p7]);                             \
        MIX(s[0], s[5], s[10], s[15], m[p8], m[p9]);                             \
        MIX(s[1], s[6], s[11], s[12], m[pa], m[pb]);                             \
        MIX(s[2], s[7], s[8], s[13], m[pc], m[pd]);                              \
        MIX(s[3], s[4], s[9], s[14], m[pe], m[pf]);                              \
    } while (0)

static inline lanes_t all(uint32_t value) { return (lanes_t){} + value; }

static inline void compress(lanes_t h[8], const lanes_t m[16], const lanes_t *length, uint32_t flags) {
    lanes_t s[16];
    for (int i = 0; i < 8; i++) s[i] = h[i];
    for (int i = 0; i < 4; i++) s[8 + i] = all(initial[i]);
    s[12] = s[13] = all(0); /* the chunk's number */
    s[14] = *length;
    s[15] = all(flags);
    ROUND(m, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(m, 2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8);
    ROUND(m, 3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1);
    ROUND(m, 10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6);
    ROUND(m, 12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4);
    ROUND(m, 9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7);
    ROUND(m, 11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13);
    for (int i = 0; i < 8; i++) h[i] = s[i] ^ s[i + 8];
}

typedef struct {
    const uint8_t *data;
    uint32_t size;
    uint32_t readable; /* bytes that may be read from `data` on, at least `size` */
} message_t;

/* The block's bytes, zeros behind the message's end. */
static inline __attribute__((always_inline)) block_t load_block(const message_t *message, uint32_t at, uint32_t have) {
    block_t block = {};
    if (message->readable - at >= BLOCK) {
        block_t order;
        memcpy(&block, message->data + at, BLOCK);
        memcpy(&order, place, BLOCK);
        return have >= BLOCK ? block : block & (block_t)(order < (uint8_t)have);
    }
    memcpy(&block, message->data + at, have);
    return block;
}

/* `names[i]` of up to LANES messages that all have `blocks` blocks. */
static void name_lanes(const message_t *const *messages, int count, uint32_t blocks, const lanes_t key[8],
                       uint8_t *const *names) {
    lanes_t h[8], m[16], length;
    memcpy(h, key, sizeof h);
    for (uint32_t b = 0; b < blocks; b++) {
        uint32_t words[LANES][16] __attribute__((aligned(64)));
        for (int lane = 0; lane < LANES; lane++) {
            const message_t *message = messages[lane < count ? lane : 0];
            uint32_t left = message->size - b * BLOCK;
            uint32_t have = left < BLOCK ? left : BLOCK;
            block_t block = load_block(message, b * BLOCK, have);
            memcpy(words[lane], &block, BLOCK);
            length[lane] = have;
        }
        for (int w = 0; w < 16; w++)
            for (int lane = 0; lane < LANES; lane++) m[w][lane] = words[lane][w];
        uint32_t flags = KEYED_HASH | (b == 0 ? CHUNK_START : 0) | (b + 1 == blocks ? CHUNK_END | ROOT : 0);
        compress(h, m, &length, flags);
    }
    uint32_t out[LANES][8];
    for (int w = 0; w < 8; w++)
        for (int lane = 0; lane < LANES; lane++) out[lane][w] = h[w][lane];
    for (int lane = 0; lane < count; lane++) memcpy(names[lane], out[lane], NAME);
}

/* Names of up to GROUP messages of 1 to MAX_KEY bytes, end to end. */
static void name_group(const message_t *messages, int count, const uint8_t key[NAME], uint8_t *names) {
    uint32_t words[8], waiting = 0;
    lanes_t lanes[8];
    memcpy(words, key, NAME);
    for (int i = 0; i < 8; i++) lanes[i] = all(words[i]);
    for (int i = 0; i < count; i++) waiting |= 1u << ((messages[i].size - 1) / BLOCK);
    for (; waiting; waiting &= waiting - 1) {
        uint32_t blocks = (uint32_t)__builtin_ctz(waiting) + 1;
        const message_t *chosen[LANES];
        uint8_t *out[LANES];
        int filled = 0;
        for (int i = 0; i < count; i++) {
            if ((messages[i].size - 1) / BLOCK + 1 != blocks) continue;
            chosen[filled] = &messages[i];
            out[filled] = names + (size_t)i * NAME;
            if (++filled == LANES) {
                name_lanes(chosen, filled, blocks, lanes, out);
                filled = 0;
            }
        }
        if (filled) name_lanes(chosen, filled, blocks, lanes, out);
    }
}
#endif

/* Name → up to four (member, tiers), in many small open-addressed parts that grow and shrink one at a time.
 *
 * Linear probing with deletion by shifting back (Knuth, TAOCP 3, 6.4, algorithm R): no tombstones, so a table that is
 * emptied and refilled stays as fast as a new one. A slot is taken if its first place is not 0.
 */
#ifndef KEY_TABLE_H
#define KEY_TABLE_H
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PART_BITS = 12, PARTS = 1 << PART_BITS, PLACES = 4, LEAST_SLOTS = 8, AHEAD = 16 };

typedef struct {
    uint64_t name[4];
    uint16_t places[PLACES]; /* 1 + (member << 3 | tiers); 0 nothing; the taken ones first */
} holders_t;

typedef struct {
    holders_t *slots;
    uint32_t size, used;
} part_t;

typedef struct {
    part_t parts[PARTS];
    uint64_t secret, factor; /* nobody outside can choose names that collide */
    uint64_t jitter;
    uint64_t count, slots;
} table_t;

table_t *table_open(const uint8_t seed[16]) {
    table_t *table = calloc(1, sizeof *table);
    if (!table) return NULL;
    memcpy(&table->secret, seed, 8);
    memcpy(&table->factor, seed + 8, 8);
    table->factor |= 1;
    table->jitter = table->factor;
    return table;
}

void table_close(table_t *table) {
    for (int i = 0; i < PARTS; i++) free(table->parts[i].slots);
    free(table);
}

uint64_t table_count(const table_t *table) { return table->count; }
uint64_t table_bytes(const table_t *table) { return sizeof *table + table->slots * sizeof(holders_t); }

static inline uint64_t scatter(const table_t *table, const uint64_t name[4]) {
    return (name[0] ^ table->secret) * table->factor;
}
static inline part_t *part_of(table_t *table, uint64_t hash) { return &table->parts[hash >> (64 - PART_BITS)]; }
static inline uint32_t home_of(const part_t *part, uint64_t hash) {
    return (uint32_t)(((hash >> 20 & 0xFFFFFFFF) * part->size) >> 32);
}
static inline uint32_t following(const part_t *part, uint32_t at) { return at + 1 == part->size ? 0 : at + 1; }

/* The slot of `name`, or the free one where it belongs; NULL in a part without slots. */
static inline holders_t *seek(const part_t *part, uint64_t hash, const uint64_t name[4]) {
    if (!part->size) return NULL;
    uint32_t at = home_of(part, hash);
    while (part->slots[at].places[0] && memcmp(part->slots[at].name, name, sizeof part->slots->name) != 0)
        at = following(part, at);
    return &part->slots[at];
}

/* 0 if there is no memory; nothing has changed then. */
static int resize(table_t *table, part_t *part, uint32_t size) {
    part_t bigger = {calloc(size, sizeof(holders_t)), size, part->used};
    if (!bigger.slots) return 0;
    for (uint32_t i = 0; i < part->size; i++)
        if (part->slots[i].places[0])
            *seek(&bigger, scatter(table, part->slots[i].name), part->slots[i].name) = part->slots[i];
    table->slots += size;
    table->slots -= part->size;
    free(part->slots);
    *part = bigger;
    return 1;
}

/* By half, more or less: parts that fill at one pace do not all grow in one call. */
static int grow(table_t *table, part_t *part) {
    if (!part->size) return resize(table, part, LEAST_SLOTS);
    table->jitter ^= table->jitter << 13;
    table->jitter ^= table->jitter >> 7;
    table->jitter ^= table->jitter << 17;
    return resize(table, part, part->size + part->size * 3 / 8 + (uint32_t)(table->jitter % (part->size / 4 + 1)));
}

static void settle(table_t *table, part_t *part) {
    if (part->size > LEAST_SLOTS && part->used < part->size / 5)
        resize(table, part, part->used * 2 < LEAST_SLOTS ? LEAST_SLOTS : part->used * 2);
}

static void erase(table_t *table, part_t *part, holders_t *slot) {
    uint32_t hole = (uint32_t)(slot - part->slots), at = hole;
    for (;;) {
        at = following(part, at);
        if (!part->slots[at].places[0]) break;
        uint32_t home = home_of(part, scatter(table, part->slots[at].name));
        int stays = hole < at ? home > hole && home <= at : home > hole || home <= at;
        if (stays) continue;
        part->slots[hole] = part->slots[at];
        hole = at;
    }
    memset(&part->slots[hole], 0, sizeof(holders_t));
    part->used--;
    table->count--;
}

static inline int place_of(const holders_t *slot, uint32_t member) {
    for (int i = 0; i < PLACES && slot->places[i]; i++)
        if ((uint32_t)(slot->places[i] - 1) >> 3 == member) return i;
    return -1;
}

static inline void drop_place(holders_t *slot, int place) {
    for (; place + 1 < PLACES; place++) slot->places[place] = slot->places[place + 1];
    slot->places[PLACES - 1] = 0;
}

/* Hashes of the next few names, their slots on the way from memory. */
static size_t approach(table_t *table, const uint8_t *names, size_t left, uint64_t hashes[AHEAD]) {
    size_t count = left < AHEAD ? left : AHEAD;
    for (size_t i = 0; i < count; i++) {
        uint64_t name[4];
        memcpy(name, names + i * 32, 32);
        hashes[i] = scatter(table, name);
        const part_t *part = part_of(table, hashes[i]);
        if (!part->size) continue;
        const char *home = (const char *)&part->slots[home_of(part, hashes[i])];
        __builtin_prefetch(home);
        __builtin_prefetch(home + 64);
    }
    return count;
}

/* How many names the member did not hold before, or -1: no memory (the names before that one are in). */
int64_t table_add(table_t *table, uint32_t member, uint32_t tiers, const uint8_t *names, size_t count) {
    int64_t fresh = 0;
    uint64_t hashes[AHEAD], name[4];
    for (size_t at = 0, got; at < count; at += got) {
        got = approach(table, names + at * 32, count - at, hashes);
        for (size_t i = 0; i < got; i++) {
            memcpy(name, names + (at + i) * 32, 32);
            part_t *part = part_of(table, hashes[i]);
            holders_t *slot = seek(part, hashes[i], name);
            if (!slot || !slot->places[0]) {
                if (4 * (uint64_t)(part->used + 1) > 3 * (uint64_t)part->size) {
                    if (!grow(table, part)) return -1;
                    slot = seek(part, hashes[i], name);
                }
                memcpy(slot->name, name, 32);
                part->used++;
                table->count++;
            }
            int place = place_of(slot, member);
            if (place >= 0) {
                slot->places[place] = (uint16_t)(1 + ((slot->places[place] - 1) | tiers));
                continue;
            }
            for (place = 0; place < PLACES && slot->places[place]; place++) {}
            if (place == PLACES) continue;
            slot->places[place] = (uint16_t)(1 + (member << 3 | tiers));
            fresh++;
        }
    }
    return fresh;
}

/* How many names the member does not hold any more. */
int64_t table_discard(table_t *table, uint32_t member, uint32_t tiers, const uint8_t *names, size_t count) {
    int64_t gone = 0;
    uint64_t hashes[AHEAD], name[4];
    for (size_t at = 0, got; at < count; at += got) {
        got = approach(table, names + at * 32, count - at, hashes);
        for (size_t i = 0; i < got; i++) {
            memcpy(name, names + (at + i) * 32, 32);
            part_t *part = part_of(table, hashes[i]);
            holders_t *slot = seek(part, hashes[i], name);
            int place = slot && slot->places[0] ? place_of(slot, member) : -1;
            if (place < 0) continue;
            uint32_t left = (uint32_t)(slot->places[place] - 1) & ~tiers;
            if (left & 7) {
                slot->places[place] = (uint16_t)(1 + left);
                continue;
            }
            gone++;
            drop_place(slot, place);
            if (slot->places[0]) continue;
            erase(table, part, slot);
            settle(table, part);
        }
    }
    return gone;
}

void table_places(table_t *table, const uint8_t *names, size_t count, uint8_t *places) {
    uint64_t hashes[AHEAD], name[4];
    for (size_t at = 0, got; at < count; at += got) {
        got = approach(table, names + at * 32, count - at, hashes);
        for (size_t i = 0; i < got; i++) {
            memcpy(name, names + (at + i) * 32, 32);
            const holders_t *slot = seek(part_of(table, hashes[i]), hashes[i], name);
            uint8_t *out = places + (at + i) * sizeof slot->places;
            if (slot) memcpy(out, slot->places, sizeof slot->places);
            else memset(out, 0, sizeof slot->places);
        }
    }
}

static inline int listed(const uint8_t *members, uint16_t place) {
    uint32_t member = (uint32_t)(place - 1) >> 3;
    return members[member >> 3] >> (member & 7) & 1;
}

/* Whole parts from number `at` on, until they have `count` names; how many names, and the part behind them (PARTS: the
 * end) in `next`. */
uint64_t table_span(const table_t *table, uint32_t at, uint64_t count, uint32_t *next) {
    uint64_t used = 0;
    while (at < PARTS && (used == 0 || used < count)) used += table->parts[at++].used;
    *next = at;
    return used;
}

/* Names in the parts `at` to `end` that one of `members` (one bit each) holds; how many. */
uint64_t table_held(const table_t *table, const uint8_t *members, uint32_t at, uint32_t end, uint8_t *names) {
    uint64_t found = 0;
    for (; at < end; at++) {
        const part_t *part = &table->parts[at];
        for (uint32_t i = 0; i < part->size; i++) {
            const holders_t *slot = &part->slots[i];
            int wanted = 0;
            for (int p = 0; p < PLACES && slot->places[p]; p++) wanted |= listed(members, slot->places[p]);
            if (wanted) memcpy(names + 32 * found++, slot->name, 32);
        }
    }
    return found;
}

/* Forget members in whole parts. Shifting back moves entries only to slots not yet passed. */
void table_sweep(table_t *table, const uint8_t *members, uint32_t at, uint32_t end) {
    for (; at < end; at++) {
        part_t *part = &table->parts[at];
        for (uint32_t i = 0; i < part->size;) {
            holders_t *slot = &part->slots[i];
            if (!slot->places[0]) {
                i++;
                continue;
            }
            for (int p = 0; p < PLACES && slot->places[p];) {
                if (listed(members, slot->places[p])) drop_place(slot, p);
                else p++;
            }
            if (slot->places[0]) i++;
            else erase(table, part, slot);
        }
        settle(table, part);
    }
}
#endif

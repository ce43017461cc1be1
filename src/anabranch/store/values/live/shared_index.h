/* Name → place in shared memory: one writer, readers in any process that take no lock (see `index_file` for the file).
 *
 * Open addressing with linear probing; deletion shifts later entries back, so that a reader may miss a name while that
 * happens but never finds it in a wrong place. Each slot is a seqlock (Boehm 2012, "Can seqlocks get along with
 * programming language memory models?", figure 6): its first word is
 *     generation << 32 | version << 2 | TAKEN | BUSY
 * A writer that dies leaves at most one BUSY slot and one entry twice; `index_rebuild` mends both.
 */
#ifndef SHARED_INDEX_H
#define SHARED_INDEX_H
#include "key_cutter.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { INDEX_HEADER = 4096, LIVE = 1, RETIRED = 2, REBUILDING = 3, SPINS = 64 };
enum { BUSY = 1, TAKEN = 2, ONE_VERSION = 4, SLOT_WORDS = 8 };

typedef _Atomic uint64_t word_t;
typedef struct {
    uint64_t magic, slots, capacity, secret, factor;
    word_t state, count;
} header_t;

typedef struct {
    word_t state, name[4], scope[2], offset;
} slot_t;
_Static_assert(sizeof(slot_t) == 64, "a slot is one cache line");

typedef struct {
    header_t *header;
    slot_t *slots;
    word_t *sizes;
    uint64_t count; /* slots; what the header says later does not matter */
    uint64_t secret, factor, capacity;
    size_t length;
} index_t;

typedef struct {
    uint64_t name[4], scope[2], offset, size;
    uint32_t generation, found;
} entry_t;

#define LOAD(word) atomic_load_explicit(&(word), memory_order_relaxed)
#define STORE(word, value) atomic_store_explicit(&(word), (value), memory_order_relaxed)

/* The file must have `length` = INDEX_HEADER + slots * 72 bytes and keep them. */
index_t *index_open(int fd, size_t length, int writable) {
    index_t *index = malloc(sizeof *index);
    if (!index) return NULL;
    void *base = mmap(NULL, length, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        free(index);
        return NULL;
    }
    index->header = base;
    index->count = (length - INDEX_HEADER) / (sizeof(slot_t) + sizeof(word_t));
    index->slots = (slot_t *)((char *)base + INDEX_HEADER);
    index->sizes = (word_t *)(index->slots + index->count);
    index->secret = index->header->secret;
    index->factor = index->header->factor;
    index->capacity = index->header->capacity;
    index->length = length;
    return index;
}

void index_close(index_t *index) {
    munmap(index->header, index->length);
    free(index);
}

uint64_t index_state(const index_t *index) { return LOAD(index->header->state); }
uint64_t index_count(const index_t *index) { return LOAD(index->header->count); }

static inline uint64_t index_home(const index_t *index, uint64_t first) {
    uint64_t hash = (first ^ index->secret) * index->factor;
    return ((hash >> 32) * index->count) >> 32;
}
static inline uint64_t index_next(const index_t *index, uint64_t at) { return at + 1 == index->count ? 0 : at + 1; }

/* 1: `entry` is what the slot held at one moment; 0: it is empty; -1: somebody writes there. */
static inline int read_slot(const index_t *index, uint64_t at, entry_t *entry) {
    const slot_t *slot = &index->slots[at];
    for (int spin = 0; spin < SPINS; spin++) {
        uint64_t state = atomic_load_explicit(&slot->state, memory_order_acquire);
        if (state & BUSY) continue;
        if (!(state & TAKEN)) return 0;
        for (int i = 0; i < 4; i++) entry->name[i] = LOAD(slot->name[i]);
        for (int i = 0; i < 2; i++) entry->scope[i] = LOAD(slot->scope[i]);
        entry->offset = LOAD(slot->offset);
        entry->size = LOAD(index->sizes[at]);
        entry->generation = (uint32_t)(state >> 32);
        entry->found = 1;
        atomic_thread_fence(memory_order_acquire);
        if (LOAD(slot->state) == state) return 1;
    }
    return -1;
}

static inline int names_slot(const slot_t *slot, const uint64_t name[4]) {
    return LOAD(slot->name[0]) == name[0] && LOAD(slot->name[1]) == name[1] && LOAD(slot->name[2]) == name[2] &&
           LOAD(slot->name[3]) == name[3];
}

/* 1 and the entry, or 0. A torn look at another entry can at worst miss. */
static inline int look_up(const index_t *index, const uint64_t name[4], entry_t *entry) {
    uint64_t at = index_home(index, name[0]);
    for (uint64_t steps = 0; steps < index->count; steps++, at = index_next(index, at)) {
        const slot_t *slot = &index->slots[at];
        if (!(LOAD(slot->state) & (TAKEN | BUSY))) return 0;
        if (names_slot(slot, name) && read_slot(index, at, entry) == 1 && !memcmp(entry->name, name, NAME)) return 1;
    }
    return 0;
}

static void index_approach(const index_t *index, const uint8_t *names, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint64_t first;
        memcpy(&first, names + i * NAME, 8);
        __builtin_prefetch(&index->slots[index_home(index, first)]);
    }
}

/* `found[i]`: 1 if the index has names[i] in this scope. */
static void find_group(const index_t *index, const uint8_t *names, size_t count, const uint64_t scope[2],
                       uint8_t *found) {
    for (size_t i = 0; i < count; i++) {
        uint64_t name[4];
        entry_t entry;
        memcpy(name, names + i * NAME, NAME);
        found[i] = (uint8_t)(look_up(index, name, &entry) && entry.scope[0] == scope[0] && entry.scope[1] == scope[1]);
    }
}

void index_present(const index_t *index, const uint8_t *names, size_t count, const uint8_t *scope, uint8_t *found) {
    uint64_t whose[2];
    memcpy(whose, scope, sizeof whose);
    memset(found, 0, count);
    if (index_state(index) != LIVE) return;
    for (size_t at = 0; at < count; at += GROUP) {
        size_t group = count - at < GROUP ? count - at : GROUP;
        index_approach(index, names + at * NAME, group);
        find_group(index, names + at * NAME, group, whose, found + at);
    }
}

/* Like `names_of` and `index_present` in one: while one group's slots are on the way from memory, the next one is
 * hashed. 0, or -1: see `cut`. */
int index_present_keys(const index_t *index, const uint8_t *data, size_t size, const uint8_t *separator,
                       size_t separator_size, const uint32_t *sizes, size_t count, const uint8_t *key,
                       const uint8_t *scope, uint8_t *found) {
    cutter_t cutter = {data, data + size, separator, separator_size, sizes, count};
    message_t messages[GROUP];
    uint8_t names[2][GROUP * NAME];
    uint64_t whose[2];
    memcpy(whose, scope, sizeof whose);
    memset(found, 0, count);
    int live = index_state(index) == LIVE, side = 0;
    size_t before = 0;
    while (cutter.left) {
        int got = cut(&cutter, messages);
        if (got < 0) return -1;
        name_group(messages, got, key, names[side]);
        if (live) index_approach(index, names[side], (size_t)got);
        side = !side;
        if (live) find_group(index, names[side], before, whose, found);
        found += before;
        before = (size_t)got;
    }
    if (live) find_group(index, names[!side], before, whose, found);
    return 0;
}

typedef struct {
    uint64_t offset, size;
    uint32_t generation, found;
} found_t;

/* `places[i].found` 0: not there in this scope. */
void index_find(const index_t *index, const uint8_t *names, size_t count, const uint8_t *scope, uint8_t *places) {
    uint64_t whose[2];
    memcpy(whose, scope, sizeof whose);
    int live = index_state(index) == LIVE;
    for (size_t at = 0; at < count; at += GROUP) {
        size_t group = count - at < GROUP ? count - at : GROUP;
        index_approach(index, names + at * NAME, group);
        for (size_t i = at; i < at + group; i++) {
            uint64_t name[4];
            entry_t entry;
            found_t place = {0, 0, 0, 0};
            memcpy(name, names + i * NAME, NAME);
            if (live && look_up(index, name, &entry) && entry.scope[0] == whose[0] && entry.scope[1] == whose[1])
                place = (found_t){entry.offset, entry.size, entry.generation, 1};
            memcpy(places + i * sizeof place, &place, sizeof place);
        }
    }
}

/* 1 if what the caller has read since it found this place was the value's. */
int index_still(const index_t *index, const uint8_t *name, uint64_t offset, uint64_t size, uint32_t generation) {
    uint64_t words[4];
    entry_t entry;
    atomic_thread_fence(memory_order_acquire); /* the caller's copy comes before what follows */
    memcpy(words, name, NAME);
    return index_state(index) == LIVE && look_up(index, words, &entry) && entry.offset == offset &&
           entry.size == size && entry.generation == generation;
}

/* --- the writer ------------------------------------------------------------------------------------------------- */

static void write_slot(index_t *index, uint64_t at, const entry_t *entry) {
    slot_t *slot = &index->slots[at];
    uint64_t state = LOAD(slot->state);
    STORE(slot->state, state | BUSY);
    atomic_thread_fence(memory_order_release);
    for (int i = 0; i < 4; i++) STORE(slot->name[i], entry->name[i]);
    for (int i = 0; i < 2; i++) STORE(slot->scope[i], entry->scope[i]);
    STORE(slot->offset, entry->offset);
    STORE(index->sizes[at], entry->size);
    uint32_t version = ((uint32_t)state & ~(uint32_t)(BUSY | TAKEN)) + ONE_VERSION;
    state = (uint64_t)entry->generation << 32 | version | TAKEN;
    atomic_store_explicit(&slot->state, state, memory_order_release);
}

static void clear_slot(index_t *index, uint64_t at) {
    uint32_t version = ((uint32_t)LOAD(index->slots[at].state) & ~(uint32_t)(BUSY | TAKEN)) + ONE_VERSION;
    atomic_store_explicit(&index->slots[at].state, version, memory_order_release);
}

/* Where `name` is (1) or belongs (0). */
static int seek_slot(const index_t *index, const uint64_t name[4], uint64_t *at) {
    for (*at = index_home(index, name[0]); LOAD(index->slots[*at].state) & TAKEN; *at = index_next(index, *at))
        if (names_slot(&index->slots[*at], name)) return 1;
    return 0;
}

static int insert(index_t *index, const entry_t *entry) {
    uint64_t at;
    if (!seek_slot(index, entry->name, &at)) {
        uint64_t count = LOAD(index->header->count);
        if (count >= index->capacity) return 0;
        STORE(index->header->count, count + 1);
    }
    write_slot(index, at, entry);
    return 1;
}

/* 0: full. */
int index_put(index_t *index, const uint8_t *name, const uint8_t *scope, uint64_t offset, uint64_t size,
              uint32_t generation) {
    entry_t entry = {.offset = offset, .size = size, .generation = generation, .found = 1};
    memcpy(entry.name, name, sizeof entry.name);
    memcpy(entry.scope, scope, sizeof entry.scope);
    return insert(index, &entry);
}

/* When this returns, no reader's `still` vouches for the name any more, whatever is written to its bytes next. */
void index_discard(index_t *index, const uint8_t *name) {
    uint64_t words[4], hole;
    memcpy(words, name, NAME);
    if (!seek_slot(index, words, &hole)) return;
    for (uint64_t at = index_next(index, hole); LOAD(index->slots[at].state) & TAKEN; at = index_next(index, at)) {
        uint64_t home = index_home(index, LOAD(index->slots[at].name[0]));
        if (hole < at ? home > hole && home <= at : home > hole || home <= at) continue;
        entry_t entry;
        if (read_slot(index, at, &entry) != 1) continue;
        write_slot(index, hole, &entry);
        hole = at;
    }
    clear_slot(index, hole);
    STORE(index->header->count, LOAD(index->header->count) - 1);
    atomic_thread_fence(memory_order_seq_cst);
}

/* Entries of the slots from `*at` on, at most `limit`; moves `*at` on, to the number of slots at the end. */
uint64_t index_entries(const index_t *index, uint64_t *at, uint64_t limit, uint8_t *entries) {
    uint64_t found = 0;
    for (; *at < index->count && found < limit; ++*at) {
        entry_t entry;
        if (read_slot(index, *at, &entry) == 1) memcpy(entries + sizeof entry * found++, &entry, sizeof entry);
    }
    return found;
}

/* What a dead writer left, without torn entries and doubles. 0: no memory; the index is then as before. */
int index_rebuild(index_t *index) {
    entry_t *entries = malloc((index->count + 1) * sizeof *entries);
    if (!entries) return 0;
    STORE(index->header->state, REBUILDING);
    atomic_thread_fence(memory_order_seq_cst);
    uint64_t at = 0, count = index_entries(index, &at, index->count, (uint8_t *)entries);
    for (at = 0; at < index->count; at++) clear_slot(index, at);
    STORE(index->header->count, 0);
    for (at = 0; at < count; at++) {
        uint64_t there;
        if (!seek_slot(index, entries[at].name, &there)) insert(index, &entries[at]);
    }
    free(entries);
    atomic_store_explicit(&index->header->state, LIVE, memory_order_release);
    return 1;
}

void index_retire(index_t *index) {
    STORE(index->header->state, RETIRED);
    atomic_thread_fence(memory_order_seq_cst);
}
#endif

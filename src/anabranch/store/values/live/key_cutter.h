/* Cuts joined keys into messages, either at a separator or by their lengths. */
#ifndef KEY_CUTTER_H
#define KEY_CUTTER_H
#include "blake3_lanes.h"

typedef struct {
    const uint8_t *at, *end;
    const uint8_t *separator;
    size_t separator_size; /* 0: cut by `sizes` */
    const uint32_t *sizes;
    size_t left; /* keys */
} cutter_t;

/* The separator's next place, or NULL. Its first byte occurs in it only once, so places never overlap. */
static inline const uint8_t *next_separator(const cutter_t *cutter) {
    const uint8_t *at = cutter->at;
    size_t size = cutter->separator_size;
    while ((size_t)(cutter->end - at) >= size) {
        at = memchr(at, cutter->separator[0], (size_t)(cutter->end - at) - size + 1);
        if (!at || memcmp(at + 1, cutter->separator + 1, size - 1) == 0) return at;
        at++;
    }
    return NULL;
}

/* Up to GROUP further keys, or -1: a key is empty or too long, holds the separator, or the sizes do not add up. */
static int cut(cutter_t *cutter, message_t *messages) {
    int count = cutter->left < GROUP ? (int)cutter->left : GROUP;
    for (int i = 0; i < count; i++) {
        size_t readable = (size_t)(cutter->end - cutter->at), size;
        if (cutter->separator_size) {
            const uint8_t *stop = next_separator(cutter);
            if ((stop == NULL) != (cutter->left == 1)) return -1;
            size = stop ? (size_t)(stop - cutter->at) : readable;
        } else {
            size = *cutter->sizes++;
            if (size > readable || (cutter->left == 1 && size != readable)) return -1;
        }
        if (size < 1 || size > MAX_KEY) return -1;
        messages[i] = (message_t){cutter->at, (uint32_t)size, readable < 2 * MAX_KEY ? (uint32_t)readable : 2 * MAX_KEY};
        cutter->at += size;
        if (cutter->left > 1) cutter->at += cutter->separator_size;
        cutter->left--;
    }
    return count;
}

/* Names of `count` keys joined in `data`. 0, or -1: see `cut`; `names` is then not to be used. */
int names_of(const uint8_t *data, size_t size, const uint8_t *separator, size_t separator_size, const uint32_t *sizes,
             size_t count, const uint8_t *key, uint8_t *names) {
    cutter_t cutter = {data, data + size, separator, separator_size, sizes, count};
    message_t messages[GROUP];
    while (cutter.left) {
        int got = cut(&cutter, messages);
        if (got < 0) return -1;
        name_group(messages, got, key, names);
        names += (size_t)got * NAME;
    }
    return 0;
}
#endif

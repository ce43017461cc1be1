/* A decoder layer over paged K/V, in float32. Compiled at first use by native_build.py; called by native_layers.py.
 *
 * Promise: the result for one row (token) does not depend, bit for bit, on the other rows of the step, on how a prompt
 * is cut into chunks, or on the number of threads. Every dot product runs over its inputs in ascending order, and
 * attention walks the context in blocks and segments at fixed positions, merged in order.
 *
 * Linear layers read panels of 16 outputs (weight_file.py). Attention is the online softmax of FlashAttention
 * (Dao et al. 2022, alg. 1); segments are FlashDecoding's split of the context (Dao et al. 2023), at fixed borders.
 */
#include <math.h>
#include <string.h>

#include "pool.h"

enum { PANEL = 16, BLOCK = 64, SEGMENT = 256, ROW_BLOCK = 96, ROW_UNIT = 8, TILE_ROWS = 96, MAX_HEAD = 256 };
#if defined(__AVX512F__)
enum { MR = 12 };
#else
enum { MR = 6 };
#endif
#define INLINE static inline __attribute__((always_inline))
typedef float vf __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(64)));
typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t i4 __attribute__((vector_size(16)));

typedef struct {
    int32_t hidden, heads, kv_heads, head_dim, intermediate, vocab, layers, block_tokens, kv_dtype;
    float norm_eps, scale;
    Pool *pool;
    char *pages;
    const float *embed, *head, *norm, *cos, *sin;
} Model;

typedef struct {
    const float *attn_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *mlp_norm, *gate_up, *down;
} Layer;

typedef struct {
    int32_t rows, chunks, sampled, qkv_width;
    const int32_t *tokens, *positions, *slots, *offsets, *first, *start, *table, *pages, *wanted;
    float *x, *h, *qkv, *attended, *mlp, *logits;
} Step;

/* ---- elementwise ------------------------------------------------------------------------------------------------ */

INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* Cephes' expf polynomial; exactly 1 at 0 and exactly 0 below -87. */
INLINE vf vexp(vf x) {
    const vf zero = {0};
    vi alive = x > -87.0f;
    x = pick(alive, pick(x > 88.0f, zero + 88.0f, x), zero);
    vf n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi bits = (__builtin_convertvector(n, vi) + 127) << 23;
    return pick(alive, p * (vf)bits, zero);
}

INLINE float exp1(float x) {
    vf v = {x};
    return vexp(v)[0];
}

INLINE vf turn(vf v, int by) {
    static const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __builtin_shuffle(v, (lane + by) & 15);
}

INLINE float sum16(vf v) {
    v += turn(v, 8);
    v += turn(v, 4);
    v += turn(v, 2);
    return v[0] + v[1];
}

INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }

INLINE float max16(vf v) {
    v = larger(v, turn(v, 8));
    v = larger(v, turn(v, 4));
    v = larger(v, turn(v, 2));
    return v[0] > v[1] ? v[0] : v[1];
}

static void rms_norm(const float *x, const float *weight, float *out, int n, float eps) {
    vf sum = {0};
    for (int i = 0; i < n; i += PANEL) {
        vf v = *(const vf *)(x + i);
        sum += v * v;
    }
    float factor = 1.0f / sqrtf(sum16(sum) / (float)n + eps);
    for (int i = 0; i < n; i += PANEL) *(vf *)(out + i) = *(const vf *)(x + i) * factor * *(const vf *)(weight + i);
}

/* ---- matrix tiles ----------------------------------------------------------------------------------------------- */

/* c[i] = a[i] · (b0 | b1) for i < rows; k is the inner dimension. */
INLINE void tile_rows(const int rows, const float *a, long lda, const float *b0, const float *b1, int k, float *c,
                      long ldc) {
#if defined(__AVX512F__)
    vf s0[MR], s1[MR];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) s0[i] = s1[i] = (vf){0};
    for (int j = 0; j < k; j++) {
        vf w0 = *(const vf *)(b0 + (long)j * PANEL), w1 = *(const vf *)(b1 + (long)j * PANEL);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            float v = a[i * lda + j];
            s0[i] += v * w0;
            s1[i] += v * w1;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        *(vf *)(c + i * ldc) = s0[i];
        *(vf *)(c + i * ldc + PANEL) = s1[i];
    }
#else
    for (int half = 0; half < 2; half++) {
        const float *b = half ? b1 : b0;
        vf s[MR];
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) s[i] = (vf){0};
        for (int j = 0; j < k; j++) {
            vf w = *(const vf *)(b + (long)j * PANEL);
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++) s[i] += a[i * lda + j] * w;
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) *(vf *)(c + i * ldc + half * PANEL) = s[i];
    }
#endif
}

#define CASE(n) case n: tile_rows(n, a, lda, b0, b1, k, c, ldc); break;
static void tile(int rows, const float *a, long lda, const float *b0, const float *b1, int k, float *c, long ldc) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(__AVX512F__)
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

enum Then { STORE, ADD, GATE };

INLINE void finish(enum Then then, int rows, const float *c, float *out, long ldo, int pair, int both, const float *bias) {
    for (int i = 0; i < rows; i++) {
        vf c0 = *(const vf *)(c + i * 32), c1 = *(const vf *)(c + i * 32 + PANEL);
        if (then == GATE) {
            *(vf *)(out + i * ldo + pair * PANEL) = c0 / (1.0f + vexp(-c0)) * c1;
            continue;
        }
        float *to = out + i * ldo + pair * 2 * PANEL;
        if (bias) {
            c0 += *(const vf *)(bias + pair * 2 * PANEL);
            if (both) c1 += *(const vf *)(bias + pair * 2 * PANEL + PANEL);
        }
        if (then == ADD) c0 += *(vf *)to;
        *(vf *)to = c0;
        if (!both) continue;
        if (then == ADD) c1 += *(vf *)(to + PANEL);
        *(vf *)(to + PANEL) = c1;
    }
}

typedef struct {
    enum Then then;
    int rows, k, panels;
    const float *a, *w, *bias;
    float *out;
    long ldo;
} Linear;

/* One pair of panels for one block of rows. */
static void linear_unit(const void *context, int unit, void *scratch) {
    const Linear *l = context;
    int pairs = (l->panels + 1) / 2, pair = unit % pairs, both = 2 * pair + 1 < l->panels;
    int from = unit / pairs * ROW_BLOCK, to = from + ROW_BLOCK < l->rows ? from + ROW_BLOCK : l->rows;
    const float *b0 = l->w + (long)pair * 2 * l->k * PANEL, *b1 = both ? b0 + (long)l->k * PANEL : b0;
    float *c = scratch;
    for (int r = from; r < to; r += MR) {
        int n = to - r < MR ? to - r : MR;
        tile(n, l->a + (long)r * l->k, l->k, b0, b1, l->k, c, 2 * PANEL);
        finish(l->then, n, c, l->out + r * l->ldo, l->ldo, pair, both, l->bias);
    }
}

/* out (=, += or gated) a · w. GATE: out has half as many columns. */
static void linear(Pool *pool, Linear l) {
    parallel(pool, linear_unit, &l, (l.panels + 1) / 2 * ((l.rows + ROW_BLOCK - 1) / ROW_BLOCK));
}

typedef struct {
    int n, rows;
    float eps;
    const float *x, *weight;
    const int32_t *pick;
    float *out;
} Norm;

static void norm_unit(const void *context, int unit, void *scratch) {
    const Norm *t = context;
    (void)scratch;
    for (int r = unit * ROW_UNIT; r < t->rows && r < (unit + 1) * ROW_UNIT; r++)
        rms_norm(t->x + (long)(t->pick ? t->pick[r] : r) * t->n, t->weight, t->out + (long)r * t->n, t->n, t->eps);
}

static void norm_rows(Pool *pool, Norm t) { parallel(pool, norm_unit, &t, (t.rows + ROW_UNIT - 1) / ROW_UNIT); }

/* ---- pages ------------------------------------------------------------------------------------------------------ */

INLINE size_t item_bytes(const Model *m) { return m->kv_dtype == 0 ? 4 : 2; }

/* One token's K (part 0) or V (part 1) of one head. */
INLINE char *place(const Model *m, int layer, int slot, int part, int offset, int head) {
    size_t block = ((size_t)slot * m->layers + layer) * 2 + part;
    size_t item = ((block * m->block_tokens + offset) * m->kv_heads + head) * m->head_dim;
    return m->pages + item * item_bytes(m);
}

static void put(const Model *m, char *to, const float *from, int n) {
    if (m->kv_dtype == 0) {
        memcpy(to, from, n * sizeof *from);
    } else if (m->kv_dtype == 1) {
        _Float16 *half = (_Float16 *)to;
        for (int i = 0; i < n; i++) half[i] = (_Float16)from[i];
    } else {
        uint16_t *brain = (uint16_t *)to;
        for (int i = 0; i < n; i++) {
            uint32_t bits;
            memcpy(&bits, from + i, 4);
            int nan = from[i] != from[i];
            brain[i] = nan ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
        }
    }
}

/* float32 values at `from`, converted into `space` unless they are float32 already. */
INLINE const float *get(const Model *m, const char *from, float *space, int n) {
    if (m->kv_dtype == 0) return (const float *)from;
    if (m->kv_dtype == 1) {
        const _Float16 *half = (const _Float16 *)from;
        for (int i = 0; i < n; i++) space[i] = (float)half[i];
    } else {
        const uint16_t *brain = (const uint16_t *)from;
        for (int i = 0; i < n; i++) {
            uint32_t bits = (uint32_t)brain[i] << 16;
            memcpy(space + i, &bits, 4);
        }
    }
    return space;
}

static void rotate(float *x, const float *cos, const float *sin, int half) {
    for (int i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = low * cos[i] - high * sin[i];
        x[i + half] = high * cos[i] + low * sin[i];
    }
}

static void rotate_and_store(const Model *m, const Layer *l, const Step *s, int layer, int row) {
    int d = m->head_dim, half = d / 2;
    const float *cos = m->cos + (long)s->positions[row] * half, *sin = m->sin + (long)s->positions[row] * half;
    float *q = s->qkv + (long)row * s->qkv_width, *k = q + m->heads * d, *v = k + m->kv_heads * d;
    for (int h = 0; h < m->heads + m->kv_heads; h++) {
        const float *norm = h < m->heads ? l->q_norm : l->k_norm;
        if (norm) rms_norm(q + h * d, norm, q + h * d, d, m->norm_eps);
        rotate(q + h * d, cos, sin, half);
    }
    put(m, place(m, layer, s->slots[row], 0, s->offsets[row], 0), k, m->kv_heads * d);
    put(m, place(m, layer, s->slots[row], 1, s->offsets[row], 0), v, m->kv_heads * d);
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

typedef struct {
    float max[TILE_ROWS], sum[TILE_ROWS], out[TILE_ROWS * MAX_HEAD];
} State;

typedef struct {
    float q[TILE_ROWS * MAX_HEAD], keys[BLOCK * MAX_HEAD], values[BLOCK * MAX_HEAD];
    float p[TILE_ROWS * BLOCK], correction[TILE_ROWS];
    State segment, total;
} Scratch;

/* tokens `tile` … of chunk `chunk` for K/V head `head`; `segment` -1: the whole context, else that part into `partial`. */
typedef struct {
    int32_t chunk, tile, head, segment;
    float *partial;
} Task;

INLINE int min(int a, int b) { return a < b ? a : b; }
INLINE int group(const Model *m) { return m->heads / m->kv_heads; }
INLINE int tile_tokens(const Model *m) { return group(m) >= TILE_ROWS ? 1 : TILE_ROWS / group(m); }

static void reset(State *state, int rows, int d) {
    for (int r = 0; r < rows; r++) {
        state->max[r] = -INFINITY;
        state->sum[r] = 0.0f;
    }
    memset(state->out, 0, sizeof(float) * rows * d);
}

/* Column i of `to` (leading dimension 16) = row i of four. */
INLINE void transpose4(const float *const four[4], float *to, int d) {
    for (int j = 0; j < d; j += 4) {
        v4 a = *(const v4 *)(four[0] + j), b = *(const v4 *)(four[1] + j);
        v4 c = *(const v4 *)(four[2] + j), e = *(const v4 *)(four[3] + j);
        v4 ab0 = __builtin_shuffle(a, b, (i4){0, 4, 1, 5}), ab1 = __builtin_shuffle(a, b, (i4){2, 6, 3, 7});
        v4 ce0 = __builtin_shuffle(c, e, (i4){0, 4, 1, 5}), ce1 = __builtin_shuffle(c, e, (i4){2, 6, 3, 7});
        *(v4 *)(to + j * PANEL) = __builtin_shuffle(ab0, ce0, (i4){0, 1, 4, 5});
        *(v4 *)(to + (j + 1) * PANEL) = __builtin_shuffle(ab0, ce0, (i4){2, 3, 6, 7});
        *(v4 *)(to + (j + 2) * PANEL) = __builtin_shuffle(ab1, ce1, (i4){0, 1, 4, 5});
        *(v4 *)(to + (j + 3) * PANEL) = __builtin_shuffle(ab1, ce1, (i4){2, 3, 6, 7});
    }
}

/* Keys as [4 panels][head_dim][16 tokens], values as [head_dim / 16][64 tokens][16]. */
static void load_block(const Model *m, const Step *s, const Task *t, int layer, int from, int count, Scratch *w) {
    int d = m->head_dim;
    const int32_t *pages = s->pages + s->table[t->chunk];
    if (count < BLOCK) {
        memset(w->keys, 0, sizeof(float) * BLOCK * d);
        memset(w->values, 0, sizeof(float) * BLOCK * d);
    }
    const float *rows[BLOCK];
    float space[BLOCK * MAX_HEAD];
    for (int i = 0; i < count; i++) {
        int slot = pages[(from + i) / m->block_tokens], offset = (from + i) % m->block_tokens;
        rows[i] = get(m, place(m, layer, slot, 0, offset, t->head), space + i * d, d);
        float converted[MAX_HEAD];
        const float *value = get(m, place(m, layer, slot, 1, offset, t->head), converted, d);
        for (int j = 0; j < d; j += PANEL) *(vf *)(w->values + (j * BLOCK) + i * PANEL) = *(const vf *)(value + j);
    }
    for (int i = 0; i < count; i += 4) {
        const float *zero = w->q; /* any readable address: lanes beyond `count` are masked later */
        const float *four[4] = {rows[i], i + 1 < count ? rows[i + 1] : zero, i + 2 < count ? rows[i + 2] : zero,
                                i + 3 < count ? rows[i + 3] : zero};
        transpose4(four, w->keys + i / PANEL * d * PANEL + i % PANEL, d);
    }
}

/* Scores in w->p become weights. A row that sees nothing of the block keeps its state and gets zero weights. */
static void soften(State *state, Scratch *w, int rows, int g, int position, int from) {
    static const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int r = 0; r < rows; r++) {
        int visible = position + r / g + 1 - from;
        float *p = w->p + r * BLOCK;
        if (visible <= 0) {
            memset(p, 0, sizeof(float) * BLOCK);
            w->correction[r] = 1.0f;
            continue;
        }
        vf s[BLOCK / PANEL], most = (vf){0} - 1e30f, sum = {0};
        for (int j = 0; j < BLOCK / PANEL; j++) {
            s[j] = *(vf *)(p + j * PANEL);
            if (visible < BLOCK) s[j] = pick(lane < visible - j * PANEL, s[j], (vf){0} - 1e30f);
            most = larger(s[j], most);
        }
        float old = state->max[r], top = max16(most);
        top = top > old ? top : old;
        for (int j = 0; j < BLOCK / PANEL; j++) {
            vf weight = vexp(s[j] - top);
            *(vf *)(p + j * PANEL) = weight;
            sum += weight;
        }
        w->correction[r] = exp1(old - top);
        state->max[r] = top;
        state->sum[r] = state->sum[r] * w->correction[r] + sum16(sum);
    }
}

static void accumulate(State *state, Scratch *w, int rows, int d) {
    float c[MR * 32];
    for (int r = 0; r < rows; r += MR) {
        int n = min(rows - r, MR);
        for (int j = 0; j < d; j += 2 * PANEL) {
            int both = j + PANEL < d;
            const float *v0 = w->values + j * BLOCK, *v1 = both ? v0 + BLOCK * PANEL : v0;
            tile(n, w->p + r * BLOCK, BLOCK, v0, v1, BLOCK, c, 32);
            for (int i = 0; i < n; i++) {
                float *out = state->out + (r + i) * d + j;
                *(vf *)out = *(vf *)out * w->correction[r + i] + *(vf *)(c + i * 32);
                if (both) *(vf *)(out + PANEL) = *(vf *)(out + PANEL) * w->correction[r + i] + *(vf *)(c + i * 32 + PANEL);
            }
        }
    }
}

static void merge(float *max, float *sum, float *out, float max2, float sum2, const float *out2, int d) {
    if (sum2 == 0.0f) return;
    float top = *max > max2 ? *max : max2, f1 = exp1(*max - top), f2 = exp1(max2 - top);
    *max = top;
    *sum = *sum * f1 + sum2 * f2;
    for (int i = 0; i < d; i += PANEL) *(vf *)(out + i) = *(vf *)(out + i) * f1 + *(const vf *)(out2 + i) * f2;
}

static void run_segment(const Model *m, const Step *s, const Task *t, int layer, int rows, int position, int segment,
                        int context, Scratch *w) {
    int d = m->head_dim, g = group(m), end = min(context, (segment + 1) * SEGMENT);
    reset(&w->segment, rows, d);
    for (int from = segment * SEGMENT; from < end; from += BLOCK) {
        load_block(m, s, t, layer, from, min(end - from, BLOCK), w);
        for (int r = 0; r < rows; r += MR)
            for (int j = 0; j < BLOCK; j += 2 * PANEL)
                tile(min(rows - r, MR), w->q + r * d, d, w->keys + j * d, w->keys + (j + PANEL) * d, d,
                     w->p + r * BLOCK + j, BLOCK);
        soften(&w->segment, w, rows, g, position, from);
        accumulate(&w->segment, w, rows, d);
    }
}

static void write_out(float *to, const float *out, float sum, int d) {
    for (int i = 0; i < d; i += PANEL) *(vf *)(to + i) = *(const vf *)(out + i) / sum;
}

static void run_task(const Model *m, const Step *s, const Task *t, int layer, Scratch *w) {
    int d = m->head_dim, g = group(m), first = s->first[t->chunk] + t->tile;
    int tokens = min(s->first[t->chunk + 1] - first, tile_tokens(m)), rows = tokens * g;
    int position = s->start[t->chunk] + t->tile, context = position + tokens;
    for (int r = 0; r < rows; r++) {
        const float *q = s->qkv + (long)(first + r / g) * s->qkv_width + (t->head * g + r % g) * d;
        for (int i = 0; i < d; i += PANEL) *(vf *)(w->q + r * d + i) = *(const vf *)(q + i) * m->scale;
    }
    if (t->segment >= 0) {
        run_segment(m, s, t, layer, rows, position, t->segment, context, w);
        for (int r = 0; r < rows; r++) {
            float *to = t->partial + (long)r * (d + 2);
            memcpy(to, w->segment.out + r * d, d * sizeof *to);
            to[d] = w->segment.max[r];
            to[d + 1] = w->segment.sum[r];
        }
        return;
    }
    State *total = &w->total;
    reset(total, rows, d);
    for (int segment = 0; segment * SEGMENT < context; segment++) {
        run_segment(m, s, t, layer, rows, position, segment, context, w);
        for (int r = 0; r < rows; r++)
            merge(total->max + r, total->sum + r, total->out + r * d, w->segment.max[r], w->segment.sum[r],
                  w->segment.out + r * d, d);
    }
    for (int r = 0; r < rows; r++)
        write_out(s->attended + ((long)(first + r / g) * m->heads + t->head * g + r % g) * d, total->out + r * d,
                  total->sum[r], d);
}

/* Merge the partial results of one (chunk, head) whose context was split. `t` is its first segment's task. */
static void join(const Model *m, const Step *s, const Task *t, int segments) {
    int d = m->head_dim, g = group(m), first = s->first[t->chunk], rows = (s->first[t->chunk + 1] - first) * g;
    float out[MAX_HEAD];
    for (int r = 0; r < rows; r++) {
        float max = -INFINITY, sum = 0.0f;
        memset(out, 0, sizeof(float) * d);
        for (int i = 0; i < segments; i++) {
            const float *part = t[i].partial + (long)r * (d + 2);
            merge(&max, &sum, out, part[d], part[d + 1], part, d);
        }
        write_out(s->attended + ((long)(first + r / g) * m->heads + t->head * g + r % g) * d, out, sum, d);
    }
}

/* Chunks of one tile are split by segment, so that few long sequences still use all threads. */
static int plan(const Model *m, const Step *s, Task *tasks, float *partial, long *partial_floats) {
    int count = 0, per_tile = tile_tokens(m);
    *partial_floats = 0;
    for (int c = 0; c < s->chunks; c++) {
        int tokens = s->first[c + 1] - s->first[c], context = s->start[c] + tokens;
        int split = tokens <= per_tile && context > SEGMENT;
        int segments = split ? (context + SEGMENT - 1) / SEGMENT : 1;
        int tiles = (tokens + per_tile - 1) / per_tile;
        for (int tile = tiles - 1; tile >= 0; tile--)
            for (int h = 0; h < m->kv_heads; h++)
                for (int i = 0; i < segments; i++, count++) {
                    if (tasks) {
                        tasks[count] = (Task){c, tile * per_tile, h, split ? i : -1, partial + *partial_floats};
                    }
                    if (split) *partial_floats += (long)tokens * group(m) * (m->head_dim + 2);
                }
    }
    return count;
}

/* ---- entry points ----------------------------------------------------------------------------------------------- */

void embed_rows(const Model *m, const Step *s) {
    for (int r = 0; r < s->rows; r++) {
        const float *from = m->embed + (long)(s->tokens[r] / PANEL) * m->hidden * PANEL + s->tokens[r] % PANEL;
        for (int i = 0; i < m->hidden; i++) s->x[(long)r * m->hidden + i] = from[(long)i * PANEL];
    }
}

typedef struct {
    const Model *m;
    const Layer *l;
    const Step *s;
    int layer;
    const Task *tasks;
    int count;
} Pass;

static void store_unit(const void *context, int unit, void *scratch) {
    const Pass *p = context;
    (void)scratch;
    for (int r = unit * ROW_UNIT; r < p->s->rows && r < (unit + 1) * ROW_UNIT; r++)
        rotate_and_store(p->m, p->l, p->s, p->layer, r);
}

static void task_unit(const void *context, int unit, void *scratch) {
    const Pass *p = context;
    run_task(p->m, p->s, p->tasks + unit, p->layer, scratch);
}

static void join_unit(const void *context, int unit, void *scratch) {
    const Pass *p = context;
    (void)scratch;
    if (p->tasks[unit].segment != 0) return;
    int n = 1;
    while (unit + n < p->count && p->tasks[unit + n].segment == n) n++;
    join(p->m, p->s, p->tasks + unit, n);
}

/* New q, k, v of a layer; K and V go to their pages. */
void project(const Model *m, const Layer *l, const Step *s, int layer) {
    Pass pass = {m, l, s, layer, NULL, 0};
    norm_rows(m->pool, (Norm){m->hidden, s->rows, m->norm_eps, s->x, l->attn_norm, NULL, s->h});
    linear(m->pool, (Linear){STORE, s->rows, m->hidden, s->qkv_width / PANEL, s->h, l->qkv, l->qkv_bias, s->qkv,
                             s->qkv_width});
    parallel(m->pool, store_unit, &pass, (s->rows + ROW_UNIT - 1) / ROW_UNIT);
}

/* Attention and MLP of a layer, added to x. Returns 0, or -1 without memory. */
int attend(const Model *m, const Layer *l, const Step *s, int layer) {
    long floats = 0;
    int count = plan(m, s, NULL, NULL, &floats), width = m->heads * m->head_dim;
    Task *tasks = malloc(sizeof *tasks * count);
    float *partial = malloc(sizeof *partial * (floats + 1));
    if (!tasks || !partial) {
        free(tasks);
        free(partial);
        return -1;
    }
    plan(m, s, tasks, partial, &floats);
    Pass pass = {m, l, s, layer, tasks, count};
    parallel(m->pool, task_unit, &pass, count);
    if (floats) parallel(m->pool, join_unit, &pass, count);
    linear(m->pool, (Linear){ADD, s->rows, width, m->hidden / PANEL, s->attended, l->o, NULL, s->x, m->hidden});
    norm_rows(m->pool, (Norm){m->hidden, s->rows, m->norm_eps, s->x, l->mlp_norm, NULL, s->h});
    linear(m->pool, (Linear){GATE, s->rows, m->hidden, 2 * m->intermediate / PANEL, s->h, l->gate_up, NULL, s->mlp,
                             m->intermediate});
    linear(m->pool, (Linear){ADD, s->rows, m->intermediate, m->hidden / PANEL, s->mlp, l->down, NULL, s->x, m->hidden});
    free(tasks);
    free(partial);
    return 0;
}

/* Logits of the wanted rows, leading dimension vocab rounded up to panels. */
void predict(const Model *m, const Step *s) {
    int panels = (m->vocab + PANEL - 1) / PANEL;
    norm_rows(m->pool, (Norm){m->hidden, s->sampled, m->norm_eps, s->x, m->norm, s->wanted, s->h});
    linear(m->pool, (Linear){STORE, s->sampled, m->hidden, panels, s->h, m->head, NULL, s->logits, (long)panels * PANEL});
}

Pool *pool_open(int threads) { return pool_with_scratch(threads, sizeof(Scratch)); }

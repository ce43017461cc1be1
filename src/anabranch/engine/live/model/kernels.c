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
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PANEL = 16, BLOCK = 32, SEGMENT = 256, ROW_BLOCK = 96, TILE_ROWS = 96, MAX_HEAD = 256 };
#if defined(__AVX512F__)
enum { MR = 12 };
#else
enum { MR = 6 };
#endif
#define INLINE static inline __attribute__((always_inline))
typedef float vf __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(64)));

typedef struct {
    int32_t hidden, heads, kv_heads, head_dim, intermediate, vocab, layers, block_tokens, kv_dtype, threads;
    float norm_eps, scale;
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

INLINE float sum16(vf v) {
    float t[PANEL];
    memcpy(t, &v, sizeof t);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) t[i] += t[i + step];
    return t[0];
}

INLINE float max16(vf v) {
    float t[PANEL];
    memcpy(t, &v, sizeof t);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) t[i] = t[i] > t[i + step] ? t[i] : t[i + step];
    return t[0];
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

/* c[i] = a[i] · (b0 | b1) for i < rows: inner dimension k, c of leading dimension 32. */
INLINE void tile_rows(const int rows, const float *a, long lda, const float *b0, const float *b1, int k, float *c) {
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
        *(vf *)(c + i * 32) = s0[i];
        *(vf *)(c + i * 32 + PANEL) = s1[i];
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
        for (int i = 0; i < rows; i++) *(vf *)(c + i * 32 + half * PANEL) = s[i];
    }
#endif
}

#define CASE(n) case n: tile_rows(n, a, lda, b0, b1, k, c); break;
static void tile(int rows, const float *a, long lda, const float *b0, const float *b1, int k, float *c) {
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

/* out (=, += or gated) a · w; inside a parallel region, ends with a barrier. GATE: out has half as many columns. */
static void linear(enum Then then, const float *a, int rows, int k, const float *w, int panels, const float *bias,
                   float *out, long ldo) {
    int pairs = (panels + 1) / 2, row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
#pragma omp for schedule(dynamic)
    for (int unit = 0; unit < pairs * row_blocks; unit++) {
        int pair = unit % pairs, from = unit / pairs * ROW_BLOCK;
        int to = from + ROW_BLOCK < rows ? from + ROW_BLOCK : rows;
        int both = 2 * pair + 1 < panels;
        const float *b0 = w + (long)pair * 2 * k * PANEL, *b1 = both ? b0 + (long)k * PANEL : b0;
        float c[MR * 32];
        for (int r = from; r < to; r += MR) {
            int n = to - r < MR ? to - r : MR;
            tile(n, a + (long)r * k, k, b0, b1, k, c);
            finish(then, n, c, out + (long)r * ldo, ldo, pair, both, bias);
        }
    }
}

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

/* Keys as [head_dim][32 tokens] in two panels, values as [head_dim / 16][32 tokens][16]. */
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
    for (int panel = 0; panel < 2; panel++) {
        float *to = w->keys + panel * d * PANEL;
        int n = min(count - panel * PANEL, PANEL);
        for (int j = 0; j < d; j += 4)
            for (int i = 0; i < n; i++) {
                const float *row = rows[panel * PANEL + i] + j;
                to[j * PANEL + i] = row[0];
                to[(j + 1) * PANEL + i] = row[1];
                to[(j + 2) * PANEL + i] = row[2];
                to[(j + 3) * PANEL + i] = row[3];
            }
    }
}

/* Scores in w->p become weights. A row that sees nothing of the block keeps its state and gets zero weights. */
static void soften(State *state, Scratch *w, int rows, int g, int position, int from) {
    static const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int r = 0; r < rows; r++) {
        int visible = position + r / g + 1 - from;
        vf *p0 = (vf *)(w->p + r * BLOCK), *p1 = (vf *)(w->p + r * BLOCK + PANEL);
        if (visible <= 0) {
            *p0 = *p1 = (vf){0};
            w->correction[r] = 1.0f;
            continue;
        }
        vi in0 = lane < visible, in1 = lane < visible - PANEL;
        vf low = (vf){0} - 1e30f;
        vf s0 = pick(in0, *p0, low), s1 = pick(in1, *p1, low);
        float old = state->max[r], top = max16(pick(s0 > s1, s0, s1));
        top = top > old ? top : old;
        s0 = vexp(s0 - top);
        s1 = vexp(s1 - top);
        *p0 = s0;
        *p1 = s1;
        w->correction[r] = exp1(old - top);
        state->max[r] = top;
        state->sum[r] = state->sum[r] * w->correction[r] + sum16(s0 + s1);
    }
}

static void accumulate(State *state, Scratch *w, int rows, int d) {
    float c[MR * 32];
    for (int r = 0; r < rows; r += MR) {
        int n = min(rows - r, MR);
        for (int j = 0; j < d; j += 2 * PANEL) {
            int both = j + PANEL < d;
            const float *v0 = w->values + j * BLOCK, *v1 = both ? v0 + BLOCK * PANEL : v0;
            tile(n, w->p + r * BLOCK, BLOCK, v0, v1, BLOCK, c);
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
            tile(min(rows - r, MR), w->q + r * d, d, w->keys, w->keys + d * PANEL, d, w->p + r * BLOCK);
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

/* New q, k, v of a layer; K and V go to their pages. */
void project(const Model *m, const Layer *l, const Step *s, int layer) {
#pragma omp parallel num_threads(m->threads)
    {
#pragma omp for
        for (int r = 0; r < s->rows; r++)
            rms_norm(s->x + (long)r * m->hidden, l->attn_norm, s->h + (long)r * m->hidden, m->hidden, m->norm_eps);
        linear(STORE, s->h, s->rows, m->hidden, l->qkv, s->qkv_width / PANEL, l->qkv_bias, s->qkv, s->qkv_width);
#pragma omp for
        for (int r = 0; r < s->rows; r++) rotate_and_store(m, l, s, layer, r);
    }
}

/* Attention and MLP of a layer, added to x. Returns 0, or -1 without memory. */
int attend(const Model *m, const Layer *l, const Step *s, int layer) {
    long floats = 0;
    int count = plan(m, s, NULL, NULL, &floats);
    Task *tasks = malloc(sizeof *tasks * count);
    float *partial = malloc(sizeof *partial * (floats + 1));
    if (!tasks || !partial) {
        free(tasks);
        free(partial);
        return -1;
    }
    plan(m, s, tasks, partial, &floats);
#pragma omp parallel num_threads(m->threads)
    {
        Scratch scratch;
#pragma omp for schedule(dynamic)
        for (int i = 0; i < count; i++) run_task(m, s, tasks + i, layer, &scratch);
#pragma omp for schedule(dynamic)
        for (int i = 0; i < count; i++)
            if (tasks[i].segment == 0) {
                int n = 1;
                while (i + n < count && tasks[i + n].segment == n) n++;
                join(m, s, tasks + i, n);
            }
        linear(ADD, s->attended, s->rows, m->heads * m->head_dim, l->o, m->hidden / PANEL, NULL, s->x, m->hidden);
#pragma omp for
        for (int r = 0; r < s->rows; r++)
            rms_norm(s->x + (long)r * m->hidden, l->mlp_norm, s->h + (long)r * m->hidden, m->hidden, m->norm_eps);
        linear(GATE, s->h, s->rows, m->hidden, l->gate_up, 2 * m->intermediate / PANEL, NULL, s->mlp, m->intermediate);
        linear(ADD, s->mlp, s->rows, m->intermediate, l->down, m->hidden / PANEL, NULL, s->x, m->hidden);
    }
    free(tasks);
    free(partial);
    return 0;
}

/* Logits of the wanted rows, leading dimension vocab rounded up to panels. */
void predict(const Model *m, const Step *s) {
    int panels = (m->vocab + PANEL - 1) / PANEL;
#pragma omp parallel num_threads(m->threads)
    {
#pragma omp for
        for (int i = 0; i < s->sampled; i++)
            rms_norm(s->x + (long)s->wanted[i] * m->hidden, m->norm, s->h + (long)i * m->hidden, m->hidden, m->norm_eps);
        linear(STORE, s->h, s->sampled, m->hidden, m->head, panels, NULL, s->logits, (long)panels * PANEL);
    }
}

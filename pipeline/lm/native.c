/* One forward pass on a CPU, for inference: rows of tokens in, logits out. native.py packs, compiles and calls it.

   Every output of a matrix is one sum over its inputs in their order, in fp32, by one thread. So a row's logits are the
   same to the bit whatever other rows are computed with it, and by however many threads: the text of a prompt does not
   depend on its batch. Weights are fp32 or bf16; activations and the cache are fp32.

   Vectors are those of GCC and Clang, which make of them what the processor has. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define W 16 /* lanes */
typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t half __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t wide __attribute__((vector_size(64), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    /* sizes: hidden, feed-forward, query heads, key/value heads, of a head, of the vocabulary */
    int32_t layers, D, F, H, K, E, V;
    int32_t positions; /* that a slot of the cache holds, a multiple of W */
    int32_t is_bf16, threads;
    float eps;
    const void *embedding;          /* (V, D) */
    const void *head;               /* packed (V, D) */
    const float *norm;              /* (D) */
    const float *cos, *sin;         /* (positions, E / 2) */
    const void *const *matrices;    /* of each layer: query+key+value, output, gate, up, down; packed */
    const float *const *norms;      /* of each layer: before attention, before feed-forward, queries', keys' or NULL */
    float *cache;                   /* (slots, layers, K, 2, positions * padded E) */
} Model;

typedef struct {
    int32_t rows, groups, outputs;
    const int32_t *token, *position; /* of each row */
    const int32_t *slot, *first;     /* of each group of rows with one slot and rising positions; first has one more */
    const int32_t *output;           /* rows whose logits are wanted */
    float *logits;                   /* (outputs, V) */
    float *scratch;                  /* scratch_floats() */
} Batch;

static int up(int n) { return (n + W - 1) / W * W; }

int64_t scratch_floats(const Model *m, int64_t rows) {
    int64_t shared = up(m->D) + up((m->H + 2 * m->K) * m->E) + up(m->H * m->E) + up(m->F);
    return rows * shared + m->threads * (rows * up(m->D) + m->positions + 2 * up(m->E));
}

INLINE vec load_weights(const void *panel, int64_t k, int is_bf16) {
    if (!is_bf16) return *(const vec *)((const float *)panel + k * W);
    wide bits = __builtin_convertvector(*(const half *)((const uint16_t *)panel + k * W), wide) << 16;
    return (vec)bits;
}

/* Multiply P panels of W outputs with R rows. A panel holds W outputs' weights, input by input. */
#define KERNEL(P, R)                                                                                            \
    INLINE void kernel_##P##x##R(const char *panels, int64_t bytes, const float *x, int64_t stride, int depth,   \
                                 int is_bf16, vec out[P][R]) {                                                   \
        vec sum[P][R];                                                                                           \
        for (int p = 0; p < P; p++)                                                                              \
            for (int r = 0; r < R; r++) sum[p][r] = (vec){0};                                                    \
        for (int k = 0; k < depth; k++) {                                                                        \
            vec w[P];                                                                                            \
            _Pragma("GCC unroll 8") for (int p = 0; p < P; p++) w[p] = load_weights(panels + p * bytes, k, is_bf16); \
            _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) {                                                \
                float value = x[r * stride + k];                                                                 \
                _Pragma("GCC unroll 8") for (int p = 0; p < P; p++) sum[p][r] += w[p] * value;                   \
            }                                                                                                    \
        }                                                                                                        \
        for (int p = 0; p < P; p++)                                                                              \
            for (int r = 0; r < R; r++) out[p][r] = sum[p][r];                                                   \
    }
KERNEL(1, 1)
KERNEL(4, 1)
KERNEL(1, 4)
KERNEL(2, 8)
KERNEL(1, 8)

typedef void Store(void *context, int row, int panel, vec value);

/* Multiply panels [from, to) of a packed matrix with all rows x (rows, stride), and give each result to `store`. */
INLINE void multiply_as(const void *matrix, int from, int to, const float *x, int64_t stride, int rows, int depth,
                        int is_bf16, Store *store, void *context) {
    int64_t bytes = (int64_t)depth * W * (is_bf16 ? 2 : 4);
    for (int p = from; p < to;) {
        int many = to - p >= 4 ? 4 : 1;
        const char *panels = (const char *)matrix + p * bytes;
        int r = 0;
        for (; r + 8 <= rows; r += 8) {
            if (many == 4) {
                for (int q = 0; q < 4; q += 2) {
                    vec out[2][8];
                    kernel_2x8(panels + q * bytes, bytes, x + r * stride, stride, depth, is_bf16, out);
                    for (int i = 0; i < 2; i++)
                        for (int j = 0; j < 8; j++) store(context, r + j, p + q + i, out[i][j]);
                }
            } else {
                vec out[1][8];
                kernel_1x8(panels, bytes, x + r * stride, stride, depth, is_bf16, out);
                for (int j = 0; j < 8; j++) store(context, r + j, p, out[0][j]);
            }
        }
        for (; r + 4 <= rows; r += 4)
            for (int q = 0; q < many; q++) {
                vec out[1][4];
                kernel_1x4(panels + q * bytes, bytes, x + r * stride, stride, depth, is_bf16, out);
                for (int j = 0; j < 4; j++) store(context, r + j, p + q, out[0][j]);
            }
        for (; r < rows; r++) {
            if (many == 4) {
                vec out[4][1];
                kernel_4x1(panels, bytes, x + r * stride, stride, depth, is_bf16, out);
                for (int i = 0; i < 4; i++) store(context, r, p + i, out[i][0]);
            } else {
                vec out[1][1];
                kernel_1x1(panels, bytes, x + r * stride, stride, depth, is_bf16, out);
                store(context, r, p, out[0][0]);
            }
        }
        p += many;
    }
}

/* This thread's share of the panels of a matrix with so many outputs. */
INLINE void multiply(const Model *m, const void *matrix, int outputs, const float *x, int64_t stride, int rows, int depth,
                     int thread, Store *store, void *context) {
    int panels = up(outputs) / W, from = (int64_t)panels * thread / m->threads;
    int to = (int64_t)panels * (thread + 1) / m->threads;
    if (m->is_bf16)
        multiply_as(matrix, from, to, x, stride, rows, depth, 1, store, context);
    else
        multiply_as(matrix, from, to, x, stride, rows, depth, 0, store, context);
}

typedef struct {
    float *out;
    int64_t stride;
    int width; /* outputs beyond it are padding */
} Target;

INLINE void set(void *context, int row, int panel, vec value) {
    Target *t = context;
    float *to = t->out + row * t->stride + panel * W;
    if ((panel + 1) * W <= t->width)
        *(vec *)to = value;
    else
        memcpy(to, &value, sizeof(float) * (t->width - panel * W));
}

INLINE void add(void *context, int row, int panel, vec value) {
    Target *t = context;
    *(vec *)(t->out + row * t->stride + panel * W) += value; /* rows are padded */
}

INLINE vec choose(ivec where, vec yes, vec no) { return (vec)(((ivec)yes & where) | ((ivec)no & ~where)); }

/* exp, to 2 units in the last place. */
INLINE vec exp_of(vec x) {
    const vec low = (vec){0} - 87.0f, high = (vec){0} + 88.0f;
    x = choose(x < low, low, choose(x > high, high, x));
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return (vec)((ivec)y + (__builtin_convertvector(n, ivec) << 23));
}

INLINE void gate(void *context, int row, int panel, vec value) { /* first pass: SiLU of the gate */
    Target *t = context;
    *(vec *)(t->out + row * t->stride + panel * W) = value / (exp_of(-value) + 1.0f);
}

INLINE void scale_by(void *context, int row, int panel, vec value) { /* second: times up */
    Target *t = context;
    *(vec *)(t->out + row * t->stride + panel * W) *= value;
}

INLINE float sum_of(const float *x, const float *y, int n) {
    float total = 0;
    vec lanes = {0};
    int i = 0;
    for (; i + W <= n; i += W) lanes += *(const vec *)(x + i) * *(const vec *)(y + i);
    for (int j = 0; j < W; j++) total += lanes[j];
    for (; i < n; i++) total += x[i] * y[i];
    return total;
}

/* RMSNorm. */
INLINE void normalize(const float *x, const float *weight, int n, float eps, float *out) {
    float scale = 1.0f / sqrtf(sum_of(x, x, n) / n + eps);
    for (int i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

/* Norm, if there is one, and RoPE of one head, from x to out. */
INLINE void turn(const Model *m, const float *x, const float *norm, int position, float *out) {
    int half_size = m->E / 2;
    const float *c = m->cos + (int64_t)position * half_size, *s = m->sin + (int64_t)position * half_size;
    float plain[m->E];
    if (norm)
        normalize(x, norm, m->E, m->eps, plain);
    else
        memcpy(plain, x, sizeof plain);
    for (int i = 0; i < half_size; i++) {
        float a = plain[i], b = plain[i + half_size];
        out[i] = a * c[i] - b * s[i];
        out[i + half_size] = b * c[i] + a * s[i];
    }
}

/* Attention of one query head over the cache up to `position`. Keys lie in blocks of W positions, lane by lane. */
static void attend(const Model *m, const float *q, const float *keys, const float *values, int position, float *scores,
                   float *out) {
    int E = m->E, Ep = up(E), blocks = position / W + 1;
    float most = -INFINITY, scale = 1.0f / sqrtf((float)E), total = 0;
    for (int b = 0; b < blocks; b++) {
        const float *block = keys + (int64_t)b * E * W;
        vec sum = {0};
        for (int e = 0; e < E; e++) sum += *(const vec *)(block + e * W) * q[e];
        *(vec *)(scores + b * W) = sum * scale;
    }
    for (int s = position + 1; s < blocks * W; s++) scores[s] = -INFINITY;
    for (int s = 0; s <= position; s++) most = scores[s] > most ? scores[s] : most;
    for (int b = 0; b < blocks; b++) *(vec *)(scores + b * W) = exp_of(*(vec *)(scores + b * W) - most);
    for (int s = 0; s <= position; s++) total += scores[s];
    for (int e = 0; e < Ep; e += W) {
        vec sum = {0};
        for (int s = 0; s <= position; s++) sum += *(const vec *)(values + (int64_t)s * Ep + e) * scores[s];
        sum /= total;
        memcpy(out + e, &sum, sizeof(float) * (E - e < W ? E - e : W));
    }
}

/* All rows of one group for one key/value head: store keys and values, then let the queries look. */
static void mix(const Model *m, const Batch *b, int layer, int group, int head, const float *qkv, int64_t stride,
                float *scores, float *q, float *out, int64_t out_stride) {
    int E = m->E, Ep = up(E), shared = m->H / m->K;
    int64_t size = (int64_t)m->positions * Ep;
    float *keys = m->cache + ((((int64_t)b->slot[group] * m->layers + layer) * m->K + head) * 2) * size;
    float *values = keys + size;
    const float *q_norm = m->norms[layer * 4 + 2], *k_norm = m->norms[layer * 4 + 3];
    for (int r = b->first[group]; r < b->first[group + 1]; r++) {
        int position = b->position[r];
        turn(m, qkv + r * stride + (m->H + head) * E, k_norm, position, q);
        float *lane = keys + (int64_t)(position / W) * E * W + position % W;
        for (int e = 0; e < E; e++) lane[e * W] = q[e];
        memcpy(values + (int64_t)position * Ep, qkv + r * stride + (m->H + m->K + head) * E, sizeof(float) * E);
    }
    for (int r = b->first[group]; r < b->first[group + 1]; r++)
        for (int h = head * shared; h < (head + 1) * shared; h++) {
            turn(m, qkv + r * stride + h * E, q_norm, b->position[r], q);
            attend(m, q, keys, values, b->position[r], scores, out + r * out_stride + h * E);
        }
}

static void embed(const Model *m, int token, float *out) {
    if (!m->is_bf16) {
        memcpy(out, (const float *)m->embedding + (int64_t)token * m->D, sizeof(float) * m->D);
        return;
    }
    const uint16_t *row = (const uint16_t *)m->embedding + (int64_t)token * m->D;
    for (int i = 0; i < m->D; i++) {
        uint32_t bits = (uint32_t)row[i] << 16;
        memcpy(out + i, &bits, 4);
    }
}

#ifdef _OPENMP
#include <omp.h>
#define BARRIER _Pragma("omp barrier")
#else
#define BARRIER
#define omp_get_thread_num() 0
#endif

static void run(const Model *m, const Batch *b, int thread) {
    const int rows = b->rows, D = m->D, Dp = up(D), Fp = up(m->F), all = (m->H + 2 * m->K) * m->E, heads = m->H * m->E;
    const int64_t wide_stride = up(all), head_stride = up(heads);
    float *x = b->scratch, *qkv = x + (int64_t)rows * Dp, *mixed = qkv + rows * wide_stride;
    float *inner = mixed + rows * head_stride;
    float *own = inner + (int64_t)rows * Fp + thread * ((int64_t)rows * Dp + m->positions + 2 * up(m->E));
    float *scores = own + (int64_t)rows * Dp, *q = scores + m->positions;
    Target to_qkv = {qkv, wide_stride, all}, to_x = {x, Dp, D}, to_inner = {inner, Fp, m->F};

    for (int r = thread; r < rows; r += m->threads) embed(m, b->token[r], x + (int64_t)r * Dp);
    BARRIER
    for (int layer = 0; layer < m->layers; layer++) {
        const void *const *matrix = m->matrices + layer * 5;
        const float *const *norm = m->norms + layer * 4;
        /* Every thread normalizes all rows for itself: cheaper than to wait for one another. */
        for (int r = 0; r < rows; r++) normalize(x + (int64_t)r * Dp, norm[0], D, m->eps, own + (int64_t)r * Dp);
        multiply(m, matrix[0], all, own, Dp, rows, D, thread, set, &to_qkv);
        BARRIER
        for (int unit = thread; unit < b->groups * m->K; unit += m->threads)
            mix(m, b, layer, unit / m->K, unit % m->K, qkv, wide_stride, scores, q, mixed, head_stride);
        BARRIER
        multiply(m, matrix[1], D, mixed, head_stride, rows, heads, thread, add, &to_x);
        BARRIER
        for (int r = 0; r < rows; r++) normalize(x + (int64_t)r * Dp, norm[1], D, m->eps, own + (int64_t)r * Dp);
        multiply(m, matrix[2], m->F, own, Dp, rows, D, thread, gate, &to_inner);
        multiply(m, matrix[3], m->F, own, Dp, rows, D, thread, scale_by, &to_inner);
        BARRIER
        multiply(m, matrix[4], D, inner, Fp, rows, m->F, thread, add, &to_x);
        BARRIER
    }
    Target to_logits = {b->logits, m->V, m->V};
    for (int i = 0; i < b->outputs; i++)
        normalize(x + (int64_t)b->output[i] * Dp, m->norm, D, m->eps, own + (int64_t)i * Dp);
    multiply(m, m->head, m->V, own, Dp, b->outputs, D, thread, set, &to_logits);
}

void forward(const Model *m, const Batch *b) {
#pragma omp parallel num_threads(m->threads)
    run(m, b, omp_get_thread_num());
}

int32_t has_threads(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

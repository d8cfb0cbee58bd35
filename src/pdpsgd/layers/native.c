/* What takes PyTorch's own operations longest: the gradient of a convolution's kernel for each example, max pooling, and
 * sums over short rows. Images are laid out channels last: (examples, height, width, channels). Compiled, checked and
 * called by native.py; nothing here allocates what outlives a call. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { LANES = 16, SCALARS = 8, VECTORS = 3 }; /* SCALARS * VECTORS sums are kept in registers */
#elif defined(__AVX2__)
enum { LANES = 8, SCALARS = 4, VECTORS = 3 };
#else
#error "worth it only where a register holds eight numbers"
#endif

enum { MUCH = 1 << 15 }; /* numbers; fewer are not worth a second thread */

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float half_vector __attribute__((vector_size(2 * LANES), aligned(4), may_alias));
typedef double halves __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE long smaller(long a, long b) { return a < b ? a : b; }

/* A vector of which only the first `room` numbers are there to be read or written. */
#define LOAD(type, from, room) \
    ({ \
        type _loaded = {0}; \
        if ((room) >= LANES) \
            _loaded = *(const type *)(from); \
        else \
            memcpy(&_loaded, from, sizeof(*(from)) * (room)); \
        _loaded; \
    })
#define STORE(type, to, values, room) \
    do { \
        type _stored = values; \
        if ((room) >= LANES) \
            *(type *)(to) = _stored; \
        else \
            memcpy(to, &_stored, sizeof(*(to)) * (room)); \
    } while (0)

/* ---- Sums ---- */

static double sum_of_squares(const float *values, long count)
{
    halves sums[2] = {{0}}; /* in double precision: a square may be too small, or too large, for a float */
    long i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int half = 0; half < 2; half++) {
            halves met = __builtin_convertvector(*(const half_vector *)(values + i + half * LANES / 2), halves);
            sums[half] += met * met;
        }
    double total = 0;
    for (; i < count; i++)
        total += (double)values[i] * values[i];
    for (int lane = 0; lane < LANES / 2; lane++)
        total += sums[0][lane] + sums[1][lane];
    return total;
}

/* The sum of squares of each row, to where there is a place for it: as floats, or as doubles. */
void row_squares(int64_t rows, int64_t width, const float *values, float *floats, double *doubles)
{
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (long row = 0; row < rows; row++) {
        double square = sum_of_squares(values + row * width, width);
        if (floats != NULL)
            floats[row] = (float)square;
        else
            doubles[row] = square;
    }
}

/* From (examples, positions, width) to (examples, width). */
void position_sums(int64_t examples, int64_t positions, int64_t width, const float *values, float *sums)
{
#pragma omp parallel for schedule(static) if (examples * positions * width > MUCH)
    for (long n = 0; n < examples; n++) {
        float *restrict sum = sums + n * width;
        memset(sum, 0, sizeof(float) * width);
        for (long i = 0; i < positions; i++) {
            const float *restrict met = values + (n * positions + i) * width;
            for (long j = 0; j < width; j++)
                sum[j] += met[j];
        }
    }
}

/* ---- Kernel gradients ---- */

typedef struct {
    int64_t examples, channels, height, width;   /* of the inputs */
    int64_t out, out_height, out_width;          /* of the output gradients */
    int64_t kernel_height, kernel_width, stride_height, stride_width, dilation_height, padding_height, padding_width;
    int64_t by_columns;                          /* 1: results (out, columns); 0: (columns, out) */
    int64_t row_stride, example_stride;          /* of the results */
} convolution;

/* One of two factors, position by position: where it starts, and how far it moves along a line and between lines. */
typedef struct {
    const float *start;
    long step, line;
} factor;

/* Sum over positions of scalars (x) vectors, in registers. The numbers of both are constants once this is inlined. */
INLINE void tile(
    const convolution *c, factor scalar, factor vectors, int scalars, int count, float *result, long width, long valid)
{
    vector sums[SCALARS][VECTORS];
    for (int s = 0; s < scalars; s++)
        for (int v = 0; v < count; v++)
            sums[s][v] = (vector){0};
    for (long y = 0; y < c->out_height; y++) {
        const float *one = scalar.start + y * scalar.line, *other = vectors.start + y * vectors.line;
        for (long x = 0; x < c->out_width; x++, one += scalar.step, other += vectors.step) {
            vector met[VECTORS];
            for (int v = 0; v < count; v++)
                met[v] = *(const vector *)(other + v * LANES);
            for (int s = 0; s < scalars; s++)
                for (int v = 0; v < count; v++)
                    sums[s][v] += met[v] * one[s];
        }
    }
    for (int s = 0; s < scalars; s++)
        for (int v = 0; v < count; v++)
            STORE(vector, result + s * width + v * LANES, sums[s][v], valid - v * LANES);
}

static void any_tile(
    const convolution *c, factor scalar, factor vectors, int scalars, int count, float *result, long width, long valid)
{
#define CASE(s, v) case (s) * VECTORS + (v): tile(c, scalar, vectors, s, v, result, width, valid); break;
#define CASES(s) CASE(s, 1) CASE(s, 2) CASE(s, 3)
    switch (scalars * VECTORS + count) {
        CASES(1) CASES(2) CASES(3) CASES(4)
#ifdef __AVX512F__
        CASES(5) CASES(6) CASES(7) CASES(8)
#endif
    }
}

/* All (height x width) products of two factors, tile by tile, into a result with rows of `width`. */
static void products(
    const convolution *c, factor scalar, long height, factor vectors, long width, float *result)
{
    long tiles = (width + LANES - 1) / LANES, rounds = (tiles + VECTORS - 1) / VECTORS;
    long at_once = (tiles + rounds - 1) / rounds; /* tiles of about the same width */
    for (long first = 0; first < tiles; first += at_once)
        for (long s = 0; s < height; s += SCALARS) {
            factor some = {scalar.start + s, scalar.step, scalar.line};
            factor others = {vectors.start + first * LANES, vectors.step, vectors.line};
            any_tile(c, some, others, smaller(SCALARS, height - s), smaller(at_once, tiles - first),
                     result + s * width + first * LANES, width, width - first * LANES);
        }
}

/* Results (examples, kernel rows, ...), and their squared norms. Returns 0, or 1 if there was no memory. */
int kernel_gradients(
    const convolution *c, const float *inputs, const float *gradients, float *results, float *squares)
{
    long wide = c->width + 2 * c->padding_width, high = c->height + 2 * c->padding_height;
    long line = wide * c->channels, columns = c->kernel_width * c->channels;
    long image = c->height * c->width * c->channels, map = c->out_height * c->out_width * c->out;
    long slack = VECTORS * LANES; /* the last vector may read, and ignore, what follows */
    int failed = 0;
#pragma omp parallel
    {
        float *padded = calloc(high * line + slack, sizeof(float)), *copied = calloc(map + slack, sizeof(float));
        if (padded == NULL || copied == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (long n = 0; n < c->examples; n++) {
            if (failed)
                continue;
            for (long y = 0; y < c->height; y++)
                memcpy(padded + ((y + c->padding_height) * wide + c->padding_width) * c->channels,
                       inputs + n * image + y * c->width * c->channels, sizeof(float) * c->width * c->channels);
            const float *gradient = gradients + n * map;
            if (c->out % LANES)
                gradient = memcpy(copied, gradient, sizeof(float) * map);
            factor shares = {gradient, c->out, c->out_width * c->out};
            double total = 0;
            for (long row = 0; row < c->kernel_height; row++) {
                factor met = {padded + row * c->dilation_height * line, c->stride_width * c->channels,
                              c->stride_height * line};
                float *result = results + row * c->row_stride + n * c->example_stride;
                if (c->by_columns)
                    products(c, shares, c->out, met, columns, result);
                else
                    products(c, met, columns, shares, c->out, result);
                total += sum_of_squares(result, c->out * columns);
            }
            squares[n] = (float)total;
        }
        free(padded);
        free(copied);
    }
    return failed;
}

/* ---- Max pooling, and a ReLU after it ---- */

typedef struct {
    int64_t examples, channels, height, width, out_height, out_width;
    int64_t kernel_height, kernel_width, stride_height, stride_width, padding_height, padding_width;
    int64_t rectify; /* 1: a ReLU follows */
} pooling;

enum { NOWHERE = 255 }; /* the place of a maximum that ReLU cuts off */

INLINE integers choose(integers which, integers yes, integers no) { return (which & yes) | (~which & no); }

/* The places of a window that lie inside the image: all of them, if nothing was added around it. */
typedef struct {
    long top, left, first_row, last_row, first_column, last_column;
} window;

INLINE window window_at(const pooling *p, long y, long x, long high, long wide, int padded)
{
    long top = y * p->stride_height - p->padding_height, left = x * p->stride_width - p->padding_width;
    if (!padded)
        return (window){top, left, 0, high, 0, wide};
    return (window){top, left, top < 0 ? -top : 0, smaller(high, p->height - top),
                    left < 0 ? -left : 0, smaller(wide, p->width - left)};
}

#define FOR_EACH_PLACE(w, row, column) \
    for (long row = (w).first_row; row < (w).last_row; row++) \
        for (long column = (w).first_column; column < (w).last_column; column++)

INLINE void pool_one(const pooling *p, long n, long high, long wide, int padded,
                     const float *inputs, float *outputs, uint8_t *places)
{
    long channels = p->channels, image = p->height * p->width * channels;
    long map = p->out_height * p->out_width * channels;
    for (long y = 0; y < p->out_height; y++)
        for (long x = 0; x < p->out_width; x++) {
            window w = window_at(p, y, x, high, wide, padded);
            for (long first = 0; first < channels; first += LANES) {
                vector best = {0};
                integers place = (integers){0} + NOWHERE;
                FOR_EACH_PLACE(w, row, column) {
                    long from = ((w.top + row) * p->width + w.left + column) * channels + first;
                    vector met = LOAD(vector, inputs + n * image + from, image - from);
                    integers larger = (met > best) | (met != met) | (place == NOWHERE);
                    best = (vector)choose(larger, (integers)met, (integers)best);
                    place = choose(larger, (integers){0} + (int32_t)(row * wide + column), place);
                }
                if (p->rectify) {
                    integers cut = best <= 0;
                    best = (vector)(~cut & (integers)best);
                    place |= cut & NOWHERE;
                }
                long to = (y * p->out_width + x) * channels + first;
                STORE(vector, outputs + n * map + to, best, map - to);
                STORE(bytes, places + n * map + to, __builtin_convertvector(place, bytes), map - to);
            }
        }
}

/* The maximum of each window, and its place in it. NaN counts as the largest, as it does in PyTorch.
 * Vectors may reach into the next position: it is overwritten when its turn comes. */
void max_pool(const pooling *p, const float *inputs, float *outputs, uint8_t *places)
{
    int padded = p->padding_height || p->padding_width;
    int usual = p->kernel_height == 2 && p->kernel_width == 2 && !padded;
#pragma omp parallel for schedule(static)
    for (long n = 0; n < p->examples; n++)
        if (usual) /* the same with constants, which makes it twice as fast */
            pool_one(p, n, 2, 2, 0, inputs, outputs, places);
        else
            pool_one(p, n, p->kernel_height, p->kernel_width, padded, inputs, outputs, places);
}

/* The same by vectors, where they are full and the whole window is in the image. */
INLINE void pass_back(const pooling *p, const float *gradient, const uint8_t *places, float *corner)
{
    for (long first = 0; first < p->channels; first += LANES) {
        integers passed = *(const integers *)(gradient + first);
        integers place = __builtin_convertvector(*(const bytes *)(places + first), integers);
        for (long row = 0; row < p->kernel_height; row++)
            for (long column = 0; column < p->kernel_width; column++) {
                vector *result = (vector *)(corner + (row * p->width + column) * p->channels + first);
                *result += (vector)(passed & (place == (int32_t)(row * p->kernel_width + column)));
            }
    }
}

/* What each maximum passes back to its place. */
void max_pool_backward(const pooling *p, const float *gradients, const uint8_t *places, float *results)
{
    long channels = p->channels, image = p->height * p->width * channels;
    long map = p->out_height * p->out_width * channels;
    long offsets[NOWHERE + 1] = {0};
    for (long place = 0; place < p->kernel_height * p->kernel_width; place++)
        offsets[place] = (place / p->kernel_width * p->width + place % p->kernel_width) * channels;
#pragma omp parallel for schedule(static)
    for (long n = 0; n < p->examples; n++) {
        const float *gradient = gradients + n * map;
        const uint8_t *place = places + n * map;
        float *result = results + n * image;
        memset(result, 0, sizeof(float) * image);
        for (long y = 0; y < p->out_height; y++)
            for (long x = 0; x < p->out_width; x++, gradient += channels, place += channels) {
                long top = y * p->stride_height - p->padding_height, left = x * p->stride_width - p->padding_width;
                if (channels % LANES == 0 && !p->padding_height && !p->padding_width) {
                    pass_back(p, gradient, place, result + (top * p->width + left) * channels);
                    continue;
                }
                long corner = (top * p->width + left) * channels, somewhere = corner < 0 ? 0 : corner;
                for (long i = 0; i < channels; i++) {
                    int nothing = place[i] == NOWHERE; /* adds 0, because that is faster than a branch */
                    result[(nothing ? somewhere : corner + offsets[place[i]]) + i] += nothing ? 0 : gradient[i];
                }
            }
    }
}

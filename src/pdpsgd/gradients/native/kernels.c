/* What takes PyTorch's own operations longest: convolutions with small kernels and their gradients for each example, max
 * pooling, and sums over short rows. Images are laid out channels last: (examples, height, width, channels). Compiled,
 * checked and called by dispatch.py; nothing here allocates what outlives a call. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { LANES = 16, NUMBERS = 8, VECTORS = 3 }; /* NUMBERS * VECTORS sums are kept in registers */
#elif defined(__AVX2__)
enum { LANES = 8, NUMBERS = 4, VECTORS = 3 };
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
#ifdef __AVX512F__
INLINE vector load(const float *from, long room)
{
    return room >= LANES ? *(const vector *)from : (vector)_mm512_maskz_loadu_ps((1u << room) - 1, from);
}

INLINE void store(float *to, vector values, long room)
{
    if (room >= LANES)
        *(vector *)to = values;
    else
        _mm512_mask_storeu_ps(to, (1u << room) - 1, (__m512)values);
}
#else
INLINE __m256i there(long room) { return (__m256i)((integers){0, 1, 2, 3, 4, 5, 6, 7} < (int32_t)room); }

INLINE vector load(const float *from, long room)
{
    return room >= LANES ? *(const vector *)from : (vector)_mm256_maskload_ps(from, there(room));
}

INLINE void store(float *to, vector values, long room)
{
    if (room >= LANES)
        *(vector *)to = values;
    else
        _mm256_maskstore_ps(to, there(room), (__m256)values);
}
#endif

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

/* The square of the norm of the outer product of two rows; the first counts as `smallest` at least. */
static double outer_square(const float *left, long left_width, const float *right, long right_width, double smallest)
{
    double square = sum_of_squares(left, left_width);
    /* NaN stays NaN */
    return (square < smallest ? smallest : square) * sum_of_squares(right, right_width);
}

/* That of each row of one matrix and the same row of another. */
void outer_squares(int64_t rows, int64_t left_width, int64_t right_width, const float *left, const float *right,
                   double smallest, float *squares)
{
#pragma omp parallel for schedule(static) if (rows * (left_width + right_width) > MUCH)
    for (long row = 0; row < rows; row++)
        squares[row] = (float)outer_square(left + row * left_width, left_width, right + row * right_width, right_width,
                                           smallest);
}

static double inner_product(const float *one, const float *other, long count)
{
    halves sums[2] = {{0}};
    long i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int half = 0; half < 2; half++) {
            long at = i + half * LANES / 2;
            sums[half] += __builtin_convertvector(*(const half_vector *)(one + at), halves)
                          * __builtin_convertvector(*(const half_vector *)(other + at), halves);
        }
    double total = 0;
    for (; i < count; i++)
        total += (double)one[i] * other[i];
    for (int lane = 0; lane < LANES / 2; lane++)
        total += sums[0][lane] + sums[1][lane];
    return total;
}

/* The squared norm of the sum of each group's outer products: all inner products among its rows, and a bound on their
 * rounding. Group g has the rows from starts[g] up to starts[g + 1]. */
void group_squares(int64_t groups, const int64_t *starts, int64_t left_width, int64_t right_width, const float *left,
                   const float *right, float *squares)
{
#pragma omp parallel for schedule(static) if (starts[groups] * (left_width + right_width) > MUCH)
    for (long g = 0; g < groups; g++) {
        double gram = 0, terms = 0, size = starts[g + 1] - starts[g];
        for (long i = starts[g]; i < starts[g + 1]; i++) {
            const float *one = left + i * left_width, *other = right + i * right_width;
            double square = sum_of_squares(one, left_width) * sum_of_squares(other, right_width);
            gram += square;
            terms += __builtin_sqrt(square);
            for (long j = starts[g]; j < i; j++)
                gram += 2 * inner_product(one, left + j * left_width, left_width)
                        * inner_product(other, right + j * right_width, right_width);
        }
        double rounding = (left_width + right_width + size * size + 8) * 0x1p-52;
        squares[g] = (float)((gram < 0 ? 0 : gram) + rounding * terms * terms); /* NaN stays NaN */
    }
}

static void sum_rows(long rows, long width, const float *values, float *restrict sum)
{
    memset(sum, 0, sizeof(float) * width);
    for (long row = 0; row < rows; row++) {
        const float *restrict met = values + row * width;
        for (long j = 0; j < width; j++)
            sum[j] += met[j];
    }
}

/* The sum of each group's rows. */
void segment_sums(int64_t groups, const int64_t *starts, int64_t width, const float *values, float *sums)
{
#pragma omp parallel for schedule(static) if (starts[groups] * width > MUCH)
    for (long g = 0; g < groups; g++)
        sum_rows(starts[g + 1] - starts[g], width, values + starts[g] * width, sums + g * width);
}

/* Add the weighted sum of rows to a total, in double precision throughout. */
void add_weighted_rows(int64_t rows, int64_t width, const double *weights, const float *values, double *total)
{
    enum { TILE = 1024 };
#pragma omp parallel for schedule(static) if (rows * width > MUCH)
    for (long first = 0; first < width; first += TILE) {
        long count = smaller(TILE, width - first), row = 0;
        double sums[TILE] = {0};
        for (; row + 4 <= rows; row += 4) { /* four at a time, so that the sums are read and written less often */
            const float *restrict met = values + row * width + first;
            const double *weight = weights + row;
            for (long j = 0; j < count; j++)
                sums[j] += (weight[0] * met[j] + weight[1] * met[j + width])
                           + (weight[2] * met[j + 2 * width] + weight[3] * met[j + 3 * width]);
        }
        for (; row < rows; row++)
            for (long j = 0; j < count; j++)
                sums[j] += weights[row] * values[row * width + first + j];
        for (long j = 0; j < count; j++)
            total[first + j] += sums[j];
    }
}

/* From (examples, positions, width) to (examples, width). */
void position_sums(int64_t examples, int64_t positions, int64_t width, const float *values, float *sums)
{
#pragma omp parallel for schedule(static) if (examples * positions * width > MUCH)
    for (long n = 0; n < examples; n++)
        sum_rows(positions, width, values + n * positions * width, sums + n * width);
}

/* ---- Convolutions ----
 *
 * Outputs, gradients of kernels and gradients of inputs are all the same: matrices of sums of products. One factor of
 * a product is a number, the other a vector; the sums stay in registers. */

typedef struct {
    int64_t examples, channels, height, width;   /* of the inputs */
    int64_t out, out_height, out_width;          /* of the outputs */
    int64_t kernel_height, kernel_width, stride_height, stride_width, dilation_height, padding_height, padding_width;
} convolution;

/* One of two factors: where it starts, how far it moves from term to term of the sum, and from line to line of terms.
 * Numbers that are factors at the same time are `apart`; vectors lie side by side. */
typedef struct {
    const float *start;
    long step, line, apart;
} factor;

/* A matrix: what belongs to different numbers is `apart`. It begins with `first` (or nothing), or is added to. */
typedef struct {
    float *start;
    long apart;
    const float *first;
    int add;
} matrix;

/* So many numbers times so many vectors, which are constants once this is inlined. */
INLINE void tile(
    long lines, long terms, factor numbers, factor vectors, matrix result, long valid, int height, int width)
{
    vector sums[NUMBERS][VECTORS];
    for (int v = 0; v < width; v++) {
        vector first = {0};
        if (result.first != NULL)
            first = load(result.first + v * LANES, valid - v * LANES);
        for (int i = 0; i < height; i++)
            sums[i][v] = first;
    }
    for (long line = 0; line < lines; line++) {
        const float *one = numbers.start + line * numbers.line, *other = vectors.start + line * vectors.line;
        for (long term = 0; term < terms; term++, one += numbers.step, other += vectors.step) {
            vector met[VECTORS];
            for (int v = 0; v < width; v++)
                met[v] = *(const vector *)(other + v * LANES);
            for (int i = 0; i < height; i++)
                for (int v = 0; v < width; v++)
                    sums[i][v] += met[v] * one[i * numbers.apart];
        }
    }
    for (int i = 0; i < height; i++)
        for (int v = 0; v < width; v++) {
            float *to = result.start + i * result.apart + v * LANES;
            long room = valid - v * LANES;
            if (result.add)
                sums[i][v] += load(to, room);
            store(to, sums[i][v], room);
        }
}

static void any_tile(
    long lines, long terms, factor numbers, factor vectors, matrix result, long valid, int height, int width)
{
#define CASE(h, w) \
    case (h) * VECTORS + (w): tile(lines, terms, numbers, vectors, result, valid, h, w); break;
#define CASES(h) CASE(h, 1) CASE(h, 2) CASE(h, 3)
    switch (height * VECTORS + width) {
        CASES(1) CASES(2) CASES(3) CASES(4)
#ifdef __AVX512F__
        CASES(5) CASES(6) CASES(7) CASES(8)
#endif
    }
}

/* A whole (height x width) matrix, tile by tile. The last vector of a line may read, and ignore, what follows. */
static void products(
    long lines, long terms, factor numbers, long height, factor vectors, long width, matrix result)
{
    long tiles = (width + LANES - 1) / LANES, rounds = (tiles + VECTORS - 1) / VECTORS;
    long at_once = (tiles + rounds - 1) / rounds; /* tiles of about the same width */
    for (long tile = 0; tile < tiles; tile += at_once)
        for (long i = 0; i < height; i += NUMBERS) {
            long j = tile * LANES;
            factor some = numbers, others = vectors;
            matrix part = result;
            some.start += i * numbers.apart;
            others.start += j;
            part.start += i * result.apart + j;
            if (part.first != NULL)
                part.first += j;
            any_tile(lines, terms, some, others, part, width - j,
                     smaller(NUMBERS, height - i), smaller(at_once, tiles - tile));
        }
}

enum { SLACK = VECTORS * LANES }; /* numbers after the last that a vector may read */

/* ---- Many layers at once ----
 *
 * A layer's gradients for each example: rows of numbers, or sums over positions of outer products left (x) right. */

typedef struct {
    int64_t positions; /* 0: the rows of `left` are the gradients, and there is no `right` */
    int64_t left_width, right_width;
    const float *left, *right; /* (examples, positions, width) */
    double *total;             /* (left_width, right_width) */
} layer;

enum { BLOCK = 64, STRETCH = 256 }; /* rows, and features, that are added in single precision */

INLINE long padded_width(long width) { return (width + LANES - 1) / LANES * LANES; }

/* A power of two near the largest number of a row, so that its size can be moved to another factor exactly. Of nothing,
 * or of what is no number, it is 1. */
static float size_of(const float *row, long width)
{
    float largest = 0;
    for (long j = 0; j < width; j++)
        largest = __builtin_fabsf(row[j]) > largest ? __builtin_fabsf(row[j]) : largest;
    if (!(largest > 0x1p-120f && largest < 0x1p120f)) /* its inverse is a number, too */
        return largest > 0 ? (largest < 1 ? 0x1p-120f : 0x1p120f) : 1;
    return __builtin_ldexpf(1, __builtin_ilogbf(largest));
}

/* Inner products of all positions of a factor, times what sizes say: (positions, padded positions). */
static void gram_of(long positions, long width, const float *values, const float *sizes, int divide, float *turned,
                    float *part, double *gram)
{
    long padded = padded_width(positions);
    memset(gram, 0, sizeof(double) * positions * padded);
    for (long first = 0; first < width; first += STRETCH) {
        long count = smaller(STRETCH, width - first);
        for (long t = 0; t < positions; t++) {
            float by = divide ? 1 / sizes[t] : sizes[t];
            for (long j = 0; j < count; j++)
                turned[j * padded + t] = values[t * width + first + j] * by;
        }
        factor one = {turned, padded, 0, 1}, other = {turned, padded, 0, 1};
        products(1, count, one, positions, other, padded, (matrix){part, padded, NULL, 0});
        for (long k = 0; k < positions * padded; k++)
            gram[k] += part[k];
    }
}

static double products_square(const layer *l, long n, float *scratch, double *ratio)
{
    long positions = l->positions, padded = padded_width(positions), whole = positions * padded;
    float *sizes = scratch, *turned = sizes + padded, *part = turned + STRETCH * padded + SLACK;
    double *grams = (double *)(part + whole + whole % 2);
    const float *left = l->left + n * positions * l->left_width, *right = l->right + n * positions * l->right_width;
    for (long t = 0; t < positions; t++)
        sizes[t] = size_of(left + t * l->left_width, l->left_width);
    gram_of(positions, l->left_width, left, sizes, 1, turned, part, grams);
    gram_of(positions, l->right_width, right, sizes, 0, turned, part, grams + whole);
    double square = 0, terms = 0;
    for (long t = 0; t < positions; t++) {
        const double *one = grams + t * padded, *other = one + whole;
        for (long s = 0; s < positions; s++)
            square += one[s] * other[s];
        terms += __builtin_sqrt(one[t] * other[t]);
    }
    /* Positions may cancel: what their inner products are off by is added, twice over. */
    double added = smaller(l->left_width, STRETCH) + smaller(l->right_width, STRETCH) + 8;
    square = (square < 0 ? 0 : square) + added * 0x1p-23 * terms * terms; /* NaN stays NaN */
    *ratio = square == 0 ? 0 : terms / __builtin_sqrt(square);
    return square;
}

static long gram_room(int64_t layers, const layer *all)
{
    long most = 0;
    for (long k = 0; k < layers; k++)
        most = all[k].positions > most ? all[k].positions : most;
    long padded = padded_width(most);
    return most < 2 ? 0 : padded + STRETCH * padded + SLACK + 5 * most * padded + 2;
}

/* The squared norm of each example's gradients over all layers. A left factor of one position counts as `smallest` at
 * least. For layers with several positions, `ratios` (layers, examples) gets the sum of the norms of the products over
 * the norm of their sum. Returns 0, or 1 if there was no memory. */
int layer_squares(int64_t layers, const layer *all, int64_t examples, double smallest, double *ratios, double *squares)
{
    long work = 0, room = gram_room(layers, all);
    int failed = 0;
    for (long k = 0; k < layers; k++)
        work += examples * (all[k].positions > 1 ? 8 : 1) * (all[k].left_width + all[k].right_width);
#pragma omp parallel if (work > MUCH)
    {
        float *scratch = room ? aligned_alloc(64, (sizeof(float) * room + 63) / 64 * 64) : NULL;
        if (room && scratch == NULL) {
#pragma omp atomic write
            failed = 1;
        } else if (room)
            memset(scratch, 0, sizeof(float) * room);
#pragma omp barrier
#pragma omp for schedule(static)
        for (long n = 0; n < examples; n++) {
            double total = 0;
            for (long k = 0; k < layers && !failed; k++) {
                const layer *l = all + k;
                if (l->positions > 1) {
                    total += products_square(l, n, scratch, ratios + k * examples + n);
                    continue;
                }
                const float *left = l->left + n * l->left_width;
                total += l->positions == 0
                             ? sum_of_squares(left, l->left_width)
                             : outer_square(left, l->left_width, l->right + n * l->right_width, l->right_width, smallest);
            }
            squares[n] = total;
        }
        free(scratch);
    }
    return failed;
}

/* Rows to be added: of a unit of people, in blocks that are added in single precision; or all of them in double. */
typedef struct {
    long first, rows, blocks;
    int exact;
} unit;

INLINE long block_end(const unit *u, long block) { return u->first + u->rows * (block + 1) / u->blocks; }

/* Both factors of all rows, weighted; the size of a left factor goes to the right one. */
static void weigh(const layer *l, const float *weights, long row, float *lefts, float *rights, long padded)
{
    const float *left = l->left + row * l->left_width, *right = l->right + row * l->right_width;
    float weight = weights[row / l->positions], size = 1;
    if (l->positions > 1)
        size = size_of(left, l->left_width);
    for (long j = 0; j < l->left_width; j++)
        lefts[row * l->left_width + j] = left[j] * (1 / size) * weight;
    if (rights != NULL)
        for (long j = 0; j < l->right_width; j++)
            rights[row * padded + j] = right[j] * size;
}

static void add_tile(const layer *l, const unit *units, long count, const float *lefts, const float *rights,
                     long stride, long i, long j)
{
    enum { WIDE = VECTORS * LANES };
    long height = smaller(NUMBERS, l->left_width - i), valid = smaller(WIDE, l->right_width - j);
    int vectors = (valid + LANES - 1) / LANES;
    float met[NUMBERS * WIDE] __attribute__((aligned(64)));
    double sums[NUMBERS * WIDE] __attribute__((aligned(64))) = {0};
    for (const unit *u = units; u < units + count; u++) {
        if (u->exact) {
            for (long row = u->first; row < u->first + u->rows; row++)
                for (long a = 0; a < height; a++)
                    for (long b = 0; b < valid; b++)
                        sums[a * WIDE + b] += (double)lefts[row * l->left_width + i + a] * rights[row * stride + j + b];
            continue;
        }
        for (long block = 0, row = u->first; block < u->blocks; row = block_end(u, block), block++) {
            factor numbers = {lefts + row * l->left_width + i, l->left_width, 0, 1};
            factor others = {rights + row * stride + j, stride, 0, 1};
            any_tile(1, block_end(u, block) - row, numbers, others, (matrix){met, WIDE, NULL, 0}, WIDE, height, vectors);
            for (long a = 0; a < height; a++)
                for (long b = 0; b < vectors * LANES; b++)
                    sums[a * WIDE + b] += met[a * WIDE + b];
        }
    }
    for (long a = 0; a < height; a++)
        for (long b = 0; b < valid; b++)
            l->total[(i + a) * l->right_width + j + b] += sums[a * WIDE + b];
}

/* Adds the weighted products of a layer; called by all threads. */
static void add_layer(const layer *l, long examples, const float *weights, const unit *units, long count,
                      float *lefts, float *rights)
{
    long padded = padded_width(l->right_width), rows = examples * l->positions;
    int copied = l->positions > 1 || padded != l->right_width; /* vectors read, and ignore, what follows a row */
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++)
        weigh(l, weights, row, lefts, copied ? rights : NULL, padded);
    long high = (l->left_width + NUMBERS - 1) / NUMBERS, wide = (l->right_width + SLACK - 1) / SLACK;
#pragma omp for schedule(static)
    for (long t = 0; t < high * wide; t++)
        add_tile(l, units, count, lefts, copied ? rights : l->right, padded, t % high * NUMBERS, t / high * SLACK);
}

/* A unit has whole examples, and about as many rows as a block; or one example, and some blocks. It is added in double
 * precision where the products of one of them are so much larger than their sum that their rounding would show. */
static long cut_into_units(const layer *l, long examples, const double *ratios, unit *units)
{
    long at_once = BLOCK / l->positions > 1 ? BLOCK / l->positions : 1, count = 0;
    for (long n = 0; n < examples; n += at_once, count++) {
        long last = smaller(n + at_once, examples), rows = (last - n) * l->positions;
        int exact = 0;
        for (long i = n; l->positions > 1 && i < last; i++)
            exact |= !(ratios[i] * at_once <= BLOCK); /* also if it is no number */
        units[count] = (unit){n * l->positions, rows, (rows + BLOCK - 1) / BLOCK, exact};
    }
    return count;
}

/* Add the weighted sums over the examples to the total of each layer. `ratios` are those of layer_squares.
 * Returns 0, or 1 if there was no memory. */
int add_layers(int64_t layers, const layer *all, int64_t examples, const float *weights, const double *ratios)
{
    long left_room = 0, right_room = 0, work = 0;
    for (long k = 0; k < layers; k++) {
        long rows = examples * all[k].positions, right = padded_width(all[k].right_width) * rows;
        left_room = all[k].left_width * rows > left_room ? all[k].left_width * rows : left_room;
        right_room = right > right_room ? right : right_room;
        work += examples * (all[k].positions > 1 ? all[k].positions : 1) * all[k].left_width * all[k].right_width / 8;
    }
    float *lefts = malloc(sizeof(float) * (left_room + SLACK)), *rights = malloc(sizeof(float) * (right_room + SLACK));
    unit *units = malloc(sizeof(unit) * (examples + 1));
    double *exact = malloc(sizeof(double) * (examples + 1));
    int failed = lefts == NULL || rights == NULL || units == NULL || exact == NULL;
    for (long n = 0; n < examples && !failed; n++)
        exact[n] = weights[n];
    for (long k = 0; k < layers && !failed; k++) {
        const layer *l = all + k;
        if (l->positions == 0) {
            add_weighted_rows(examples, l->left_width, exact, l->left, l->total);
            continue;
        }
        long count = cut_into_units(l, examples, ratios + k * examples, units);
#pragma omp parallel if (work > MUCH)
        add_layer(l, examples, weights, units, count, lefts, rights);
    }
    free(lefts), free(rights), free(units), free(exact);
    return failed;
}

/* An image with room around it. */
INLINE long line_of(const convolution *c) { return (c->width + 2 * c->padding_width) * c->channels; }
INLINE long padded_size(const convolution *c) { return (c->height + 2 * c->padding_height) * line_of(c); }
INLINE float *inside(const convolution *c, float *padded, long y)
{
    return padded + (y + c->padding_height) * line_of(c) + c->padding_width * c->channels;
}

/* One image into the middle of a padded one. */
static void pad(const convolution *c, const float *image, float *padded)
{
    long line = c->width * c->channels;
    for (long y = 0; y < c->height; y++)
        memcpy(inside(c, padded, y), image + y * line, sizeof(float) * line);
}

/* What is to be done for every example. */
typedef struct {
    const convolution *c;
    const float *inputs, *gradients, *weights, *bias;
    float *results, *squares;
    const int64_t *starts; /* of groups of examples whose gradients are added up; or NULL */
    long line, columns, kernel, image, map; /* sizes: of a padded line, a kernel row, a kernel, an input, an output */
    int64_t by_columns, row_stride, example_stride;
} task;

static task task_of(const convolution *c)
{
    long columns = c->kernel_width * c->channels;
    return (task){.c = c, .line = line_of(c), .columns = columns, .kernel = c->kernel_height * columns,
                  .image = c->height * c->width * c->channels, .map = c->out_height * c->out_width * c->out};
}

/* Does it `count` times, with room for a thread to work in that begins with zeros. Returns 0, or 1 if there was no memory. */
static int for_each(const task *t, long count, long room, void (*work)(const task *, long, float *))
{
    int failed = 0;
#pragma omp parallel
    {
        float *scratch = calloc(room, sizeof(float));
        if (scratch == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (long n = 0; n < count; n++)
            if (!failed)
                work(t, n, scratch);
        free(scratch);
    }
    return failed;
}

/* Of example n, to the place of group g; the first one of a group begins it. */
static void kernel_gradient(const task *t, long n, long g, int first, float *padded)
{
    const convolution *c = t->c;
    const float *gradient = t->gradients + n * t->map;
    pad(c, t->inputs + n * t->image, padded);
    if (c->out % LANES)
        gradient = memcpy(padded + padded_size(c) + SLACK, gradient, sizeof(float) * t->map);
    factor shares = {gradient, c->out, c->out_width * c->out, 1};
    for (long row = 0; row < c->kernel_height; row++) {
        factor met = {padded + row * c->dilation_height * t->line, c->stride_width * c->channels,
                      c->stride_height * t->line, 1};
        matrix result = {t->results + row * t->row_stride + g * t->example_stride,
                         t->by_columns ? t->columns : c->out, NULL, !first};
        if (t->by_columns)
            products(c->out_height, c->out_width, shares, c->out, met, t->columns, result);
        else
            products(c->out_height, c->out_width, met, t->columns, shares, c->out, result);
    }
}

static void group_gradient(const task *t, long g, float *padded)
{
    const convolution *c = t->c;
    long begin = t->starts ? t->starts[g] : g, end = t->starts ? t->starts[g + 1] : g + 1;
    for (long n = begin; n < end; n++)
        kernel_gradient(t, n, g, n == begin, padded);
    double total = 0;
    for (long row = 0; row < c->kernel_height; row++)
        total += sum_of_squares(t->results + row * t->row_stride + g * t->example_stride, c->out * t->columns);
    t->squares[g] = (float)total;
}

/* The gradients of the kernel: results (groups, kernel rows, ...), and their squared norms. By columns, these are
 * (out, columns), else (columns, out). Without `starts` every example is a group; with them none is empty. */
int kernel_gradients(const convolution *c, int64_t by_columns, int64_t row_stride, int64_t example_stride,
                     int64_t groups, const int64_t *starts,
                     const float *inputs, const float *gradients, float *results, float *squares)
{
    task t = task_of(c);
    t.by_columns = by_columns, t.row_stride = row_stride, t.example_stride = example_stride, t.starts = starts;
    t.inputs = inputs, t.gradients = gradients, t.results = results, t.squares = squares;
    return for_each(&t, groups, padded_size(c) + SLACK + t.map + SLACK, group_gradient);
}

static void output(const task *t, long n, float *padded)
{
    const convolution *c = t->c;
    factor kernels = {t->weights, c->out, t->columns * c->out, 1};
    pad(c, t->inputs + n * t->image, padded);
    for (long y = 0; y < c->out_height; y++) {
        factor met = {padded + y * c->stride_height * t->line, 1, c->dilation_height * t->line,
                      c->stride_width * c->channels};
        matrix result = {t->results + n * t->map + y * c->out_width * c->out, c->out, t->bias, 0};
        products(c->kernel_height, t->columns, met, c->out_width, kernels, c->out, result);
    }
}

/* The outputs. Weights are (out, kernel rows, columns); there may be no bias. */
int convolve(const convolution *c, const float *inputs, const float *weights, const float *bias, float *outputs)
{
    task t = task_of(c);
    float *turned = calloc(t.kernel * c->out + SLACK, sizeof(float)); /* (kernel rows, columns, out) */
    if (turned == NULL)
        return 1;
    for (long k = 0; k < t.kernel; k++)
        for (long o = 0; o < c->out; o++)
            turned[k * c->out + o] = weights[o * t.kernel + k];
    t.inputs = inputs, t.weights = turned, t.bias = bias, t.results = outputs;
    int failed = for_each(&t, c->examples, padded_size(c), output);
    free(turned);
    return failed;
}

static void input_gradient(const task *t, long n, float *padded)
{
    const convolution *c = t->c;
    memset(padded, 0, sizeof(float) * padded_size(c));
    for (long y = 0; y < c->out_height; y++)
        for (long row = 0; row < c->kernel_height; row++) {
            factor shares = {t->gradients + n * t->map + y * c->out_width * c->out, 1, 0, c->out};
            factor kernels = {t->weights + row * t->columns, t->kernel, 0, 1};
            matrix result = {padded + (y * c->stride_height + row * c->dilation_height) * t->line,
                             c->stride_width * c->channels, NULL, 1};
            products(1, c->out, shares, c->out_width, kernels, t->columns, result);
        }
    long line = c->width * c->channels;
    for (long y = 0; y < c->height; y++)
        memcpy(t->results + n * t->image + y * line, inside(c, padded, y), sizeof(float) * line);
}

/* The gradients of the inputs. */
int convolve_back(const convolution *c, const float *gradients, const float *weights, float *results)
{
    task t = task_of(c);
    float *copied = calloc(t.kernel * c->out + SLACK, sizeof(float));
    if (copied == NULL)
        return 1;
    memcpy(copied, weights, sizeof(float) * t.kernel * c->out);
    t.gradients = gradients, t.weights = copied, t.results = results;
    int failed = for_each(&t, c->examples, padded_size(c), input_gradient);
    free(copied);
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
                    vector met = load(inputs + n * image + from, image - from);
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
                store(outputs + n * map + to, best, map - to);
                bytes narrow = __builtin_convertvector(place, bytes);
                if (map - to >= LANES)
                    *(bytes *)(places + n * map + to) = narrow;
                else
                    memcpy(places + n * map + to, &narrow, map - to);
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

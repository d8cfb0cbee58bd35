/* What takes PyTorch's own operations longest: convolutions with small kernels and their gradients for each example, max
 * pooling, and sums over short rows. Images are laid out channels last: (examples, height, width, channels). Compiled,
 * checked and called by dispatch.py; nothing here allocates what outlives a call. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { LANES = 16, NUMBERS = 8, VECTORS = 3, TOGETHER = 4 }; /* NUMBERS * VECTORS sums are kept in registers; or TOGETHER^2 */
#elif defined(__AVX2__)
enum { LANES = 8, NUMBERS = 4, VECTORS = 3, TOGETHER = 2 };
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
INLINE long larger(long a, long b) { return a > b ? a : b; }
INLINE integers choose(integers which, integers yes, integers no) { return (which & yes) | (~which & no); }

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

/* Inner products of so many rows with TOGETHER others, or with each other; which it is, and how many, are constants once
 * this is inlined. */
INLINE void some_inner_products(const float *ones, int height, const float *others, int own, long width,
                                double found[TOGETHER][TOGETHER])
{
    enum { HALF = LANES / 2 };
    halves sums[TOGETHER][TOGETHER] = {{{0}}}, met[TOGETHER], with[TOGETHER];
    long j = 0;
    for (; j + HALF <= width; j += HALF) {
        for (int a = 0; a < height; a++)
            met[a] = __builtin_convertvector(*(const half_vector *)(ones + a * width + j), halves);
        for (int b = 0; b < (own ? height : TOGETHER); b++)
            with[b] = own ? met[b] : __builtin_convertvector(*(const half_vector *)(others + b * width + j), halves);
        for (int a = 0; a < height; a++)
            for (int b = 0; b < (own ? a + 1 : TOGETHER); b++)
                sums[a][b] += met[a] * with[b];
    }
    for (int a = 0; a < height; a++)
        for (int b = 0; b < (own ? a + 1 : TOGETHER); b++) {
            double total = 0;
            for (long rest = j; rest < width; rest++)
                total += (double)ones[a * width + rest] * (own ? ones : others)[b * width + rest];
            for (int lane = 0; lane < HALF && j > 0; lane++)
                total += sums[a][b][lane];
            found[a][b] = total;
        }
}

static void inner_products(const float *ones, int height, const float *others, long width,
                           double found[TOGETHER][TOGETHER])
{
#define CASE(h) \
    case (h): some_inner_products(ones, h, others, 0, width, found); break; \
    case -(h): some_inner_products(ones, h, NULL, 1, width, found); break;
    switch (others != NULL ? height : -height) {
        CASE(1) CASE(2)
#if defined(__AVX512F__)
        CASE(3) CASE(4)
#endif
    }
#undef CASE
}

/* The squared norm of the sum of the outer products of these rows: all inner products among them, and a bound on their
 * rounding. The sum of the norms of the products goes to `terms`. */
static double group_square(long first, long last, long left_width, long right_width, const float *left,
                           const float *right, double *terms)
{
    double gram = 0, size = last - first;
    *terms = 0;
    for (long i = first; i < last; i += TOGETHER)
        for (long j = first; j <= i; j += TOGETHER) {
            double of_left[TOGETHER][TOGETHER], of_right[TOGETHER][TOGETHER];
            int height = smaller(TOGETHER, last - i), own = i == j;
            inner_products(left + i * left_width, height, own ? NULL : left + j * left_width, left_width, of_left);
            inner_products(right + i * right_width, height, own ? NULL : right + j * right_width, right_width, of_right);
            for (int a = 0; a < height; a++)
                for (int b = 0; b < (own ? a + 1 : TOGETHER); b++) {
                    double product = of_left[a][b] * of_right[a][b];
                    gram += own && a == b ? product : 2 * product;
                    *terms += own && a == b ? __builtin_sqrt(product) : 0;
                }
        }
    double rounding = (left_width + right_width + size * size + 8) * 0x1p-52;
    return (gram < 0 ? 0 : gram) + rounding * *terms * *terms; /* NaN stays NaN */
}

/* That of each group. Group g has the rows from starts[g] up to starts[g + 1]. */
void group_squares(int64_t groups, const int64_t *starts, int64_t left_width, int64_t right_width, const float *left,
                   const float *right, float *squares)
{
#pragma omp parallel for schedule(static) if (starts[groups] * (left_width + right_width) > MUCH)
    for (long g = 0; g < groups; g++) {
        double terms;
        squares[g] = (float)group_square(starts[g], starts[g + 1], left_width, right_width, left, right, &terms);
    }
}

/* The squared norm of the sum of these rows, with a bound on its rounding: rows may cancel. That is much more than
 * adding them can be off by, so that rows that cancel get small weights: each is added to a total in which others are. */
static double sum_square(long first, long last, long width, const float *values)
{
    if (last - first == 1)
        return sum_of_squares(values + first * width, width);
    double total = 0, terms = 0;
    for (long j = 0; j < width; j++) {
        double sum = 0;
        for (long i = first; i < last; i++)
            sum += values[i * width + j];
        total += sum * sum;
    }
    for (long i = first; i < last; i++)
        terms += __builtin_sqrt(sum_of_squares(values + i * width, width));
    double size = last - first;
    return total + (size * size + 8) * 0x1p-52 * terms * terms;
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
        double sums[TILE];
        memset(sums, 0, sizeof(double) * count);
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
    const float *left, *right; /* (examples, positions, width); without `right`, what add_clipped sums over positions */
    double *total;             /* (left_width, right_width) */
    const int64_t *rows;       /* of a table, or NULL */
    int64_t padding;           /* the row that gets nothing, or -1 */
} layer;

/* If there are `rows`, the layer is a table of `right_width` rows of `left_width` numbers. An example looks up `positions`
 * of them. `left` has the gradient of each lookup; or, with shares at `right`, one for all lookups of the example. */

enum { BLOCK = 64, STRETCH = 256 }; /* rows, and features, that are added in single precision at most */
enum { SHORTEST = 8 };              /* fewer rows are rather added in double precision */
enum { PEOPLE = 32 };               /* who may have several rows, and are added together */
enum { GRAM = 2 };                  /* operations of a sum of products that an inner product takes the time of */

/* What single precision may cost a unit, in halves of a last place of the largest clipping norm: rows in a block (and
 * two), times the sum of the norms of all products. Four units of that are below what clipping leaves room for. */
static const double ROUNDING = 4000;

INLINE long padded_width(long width) { return (width + LANES - 1) / LANES * LANES; }

/* The largest number of a row, whatever the signs. */
static float largest_of(const float *row, long width)
{
    int32_t largest = 0, number;
    for (long j = 0; j < width; j++) { /* without their signs, numbers are in the order of their bits; NaN is last */
        memcpy(&number, row + j, sizeof number);
        number &= INT32_MAX;
        largest = number > largest ? number : largest;
    }
    float found;
    memcpy(&found, &largest, sizeof found);
    return found;
}

/* A power of two near the largest number of a row, so that its size can be moved to another factor exactly. Of nothing,
 * or of what is no number, it is 1. */
static float size_of(const float *row, long width)
{
    float largest = largest_of(row, width);
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

/* Whether inner products of positions are fewer operations than the sum of products, whose norm it is. */
INLINE int goes_by_gram(const layer *l)
{
    return l->positions > 1 && GRAM * l->positions * (l->left_width + l->right_width) <= l->left_width * l->right_width;
}

/* `again`: the left factor is that of the last call, whose sizes and inner products are still there. */
static double gram_square(const layer *l, long n, int again, float *scratch, double *ratio)
{
    long positions = l->positions, padded = padded_width(positions), whole = positions * padded;
    float *sizes = scratch, *turned = sizes + padded, *part = turned + STRETCH * padded + SLACK;
    double *grams = (double *)(part + whole + whole % 2);
    const float *left = l->left + n * positions * l->left_width, *right = l->right + n * positions * l->right_width;
    for (long t = 0; t < positions && !again; t++)
        sizes[t] = size_of(left + t * l->left_width, l->left_width);
    if (!again)
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

/* The same for few positions: the sum of products is computed, tile by tile, and not kept. */
static double tiles_square(const layer *l, long n, float *scratch, double *ratio)
{
    enum { WIDE = VECTORS * LANES };
    long positions = l->positions;
    const float *left = l->left + n * positions * l->left_width, *right = l->right + n * positions * l->right_width;
    /* Vectors run along the factor that fills them better. */
    int along_left = padded_width(l->left_width) * l->right_width < padded_width(l->right_width) * l->left_width;
    const float *numbers = along_left ? right : left, *others = along_left ? left : right;
    long height = along_left ? l->right_width : l->left_width, width = along_left ? l->left_width : l->right_width;
    long padded = padded_width(width);
    double square = 0, terms = 0;
    for (long t = 0; t < positions; t++)
        terms += __builtin_sqrt(sum_of_squares(left + t * l->left_width, l->left_width)
                                * sum_of_squares(right + t * l->right_width, l->right_width));
    if (padded != width) {
        for (long t = 0; t < positions; t++) {
            memcpy(scratch + t * padded, others + t * width, sizeof(float) * width);
            memset(scratch + t * padded + width, 0, sizeof(float) * (padded - width));
        }
        others = scratch;
    }
    float met[NUMBERS * WIDE] __attribute__((aligned(64)));
    for (long j = 0; j < padded; j += WIDE)
        for (long i = 0; i < height; i += NUMBERS) {
            long rows = smaller(NUMBERS, height - i), valid = smaller(WIDE, padded - j);
            factor some = {numbers + i, height, 0, 1}, vectors = {others + j, padded, 0, 1};
            any_tile(1, positions, some, vectors, (matrix){met, valid, NULL, 0}, valid, rows, valid / LANES);
            square += sum_of_squares(met, rows * valid);
        }
    /* What the sums over positions are off by is added, twice over. */
    double norm = __builtin_sqrt(square) + (positions + 8) * 0x1p-23 * terms; /* NaN stays NaN */
    *ratio = norm == 0 ? 0 : terms / norm;
    return norm * norm;
}

static double person_square(const layer *l, long first, long last, double *ratio)
{
    if (l->positions == 0) {
        *ratio = 0; /* these are added in double precision */
        return sum_square(first, last, l->left_width, l->left);
    }
    double terms, square = group_square(first, last, l->left_width, l->right_width, l->left, l->right, &terms);
    *ratio = square == 0 ? 0 : terms / __builtin_sqrt(square);
    return square;
}

/* Lookups of an example that are of the same row: the next one of each, or 0; and whether there was one before. */
typedef struct {
    int64_t *next, *met;
} links;

static links link(long count, const int64_t *rows, int64_t *places)
{
    links found = {places, places + count};
    for (long k = 0; k < count; k++) {
        int64_t row = rows[k], met = 0;
        for (long j = 0; j < k; j++) /* without a way out, so that many are compared at once */
            met |= rows[j] == row;
        found.next[k] = 0, found.met[k] = met;
        for (long j = k - 1; met; j--)
            if (rows[j] == row)
                found.next[j] = k, met = 0;
    }
    return found;
}

/* What an example passes back to the row of a lookup, over all of them that are of this row. */
static void passed_to(const layer *l, links of, long k, const float *gradients, double *sum)
{
    for (long j = 0; j < l->left_width; j++)
        sum[j] = gradients[k * l->left_width + j];
    while ((k = of.next[k]) > 0)
        for (long j = 0; j < l->left_width; j++)
            sum[j] += gradients[k * l->left_width + j];
}

static double share_of(links of, long k, const float *shares)
{
    double share = shares[k];
    while ((k = of.next[k]) > 0)
        share += shares[k];
    return share;
}

/* The squared norm of what an example passes back; -1 if there is no such row. */
static double lookups_square(const layer *l, long n, int64_t *places, double *sum)
{
    const int64_t *rows = l->rows + n * l->positions;
    const float *gradients = l->left + n * l->left_width * (l->right != NULL ? 1 : l->positions);
    links of = link(l->positions, rows, places);
    double square = 0;
    for (long k = 0; k < l->positions; k++) {
        if (rows[k] < 0 || rows[k] >= l->right_width)
            return -1;
        if (of.met[k] || rows[k] == l->padding)
            continue;
        if (l->right != NULL) {
            double share = share_of(of, k, l->right + n * l->positions);
            square += share * share;
        } else if (of.next[k] == 0)
            square += sum_of_squares(gradients + k * l->left_width, l->left_width);
        else {
            passed_to(l, of, k, gradients, sum);
            for (long j = 0; j < l->left_width; j++)
                square += sum[j] * sum[j];
        }
    }
    return l->right != NULL ? square * sum_of_squares(gradients, l->left_width) : square;
}

/* Add what one example passes back, weighted, in double precision: the very numbers that the norm was taken of. */
static void add_lookups(const layer *l, long n, double weight, int64_t *places, double *sum)
{
    const int64_t *rows = l->rows + n * l->positions;
    const float *gradients = l->left + n * l->left_width * (l->right != NULL ? 1 : l->positions);
    links of = link(l->positions, rows, places);
    for (long k = 0; k < l->positions; k++) {
        if (of.met[k] || rows[k] == l->padding)
            continue;
        double by = weight, *restrict to = l->total + rows[k] * l->left_width;
        const float *restrict from = gradients;
        if (l->right != NULL)
            by *= share_of(of, k, l->right + n * l->positions);
        else
            from += k * l->left_width;
        if (l->right == NULL && of.next[k] > 0) {
            passed_to(l, of, k, gradients, sum);
            for (long j = 0; j < l->left_width; j++)
                to[j] += by * sum[j];
        } else
            for (long j = 0; j < l->left_width; j++)
                to[j] += by * from[j];
    }
}

/* Room for the links among an example's lookups, and a sum after them. */
static long lookup_room(int64_t layers, const layer *all)
{
    long most = 0;
    for (long k = 0; k < layers; k++)
        if (all[k].rows != NULL && 2 * all[k].positions + all[k].left_width > most)
            most = 2 * all[k].positions + all[k].left_width;
    return most;
}

/* Room for what norms over several positions need. */
static long room_of(int64_t layers, const layer *all)
{
    long most = 0;
    for (long k = 0; k < layers; k++) {
        const layer *l = all + k;
        if (l->rows != NULL || l->positions < 2)
            continue;
        long padded = padded_width(l->positions), widest = padded_width(larger(l->left_width, l->right_width));
        long room = goes_by_gram(l) ? padded + STRETCH * padded + SLACK + 5 * l->positions * padded + 2
                                    : l->positions * widest;
        most = larger(most, room);
    }
    return most;
}

/* The rows of a factor, and the squared norm of one of them. */
typedef struct {
    const float *left;
    long width;
    double square;
} squared;

/* The squared norm of each example's gradients over all layers. A left factor of one position counts as `smallest` at
 * least. For layers with several positions, `ratios` (layers, examples) gets the sum of the norms of the products over
 * the norm of their sum, for people those of every layer. With `starts` an example is a person, who has the rows from
 * starts[n] up to starts[n + 1], and no layer has more than one position. Returns 0, 1 if there was no memory, or 2 if a
 * table has no such row. */
int layer_squares(int64_t layers, const layer *all, int64_t examples, const int64_t *starts, double smallest,
                  double *ratios, double *squares)
{
    long work = 0, room = room_of(layers, all), places = lookup_room(layers, all);
    int failed = 0;
    for (long k = 0; k < layers; k++)
        work += all[k].rows != NULL ? examples * all[k].positions * all[k].left_width
                                    : examples * (all[k].positions > 1 ? 8 : 1) * (all[k].left_width + all[k].right_width);
#pragma omp parallel if (work > MUCH)
    {
        float *scratch = room ? aligned_alloc(64, (sizeof(float) * room + 63) / 64 * 64) : NULL;
        int64_t *linked = places ? malloc(sizeof(int64_t) * places) : NULL;
        if ((room && scratch == NULL) || (places && linked == NULL)) {
#pragma omp atomic write
            failed = 1;
        } else if (room)
            memset(scratch, 0, sizeof(float) * room);
#pragma omp barrier
#pragma omp for schedule(static)
        for (long n = 0; n < examples; n++) {
            double total = 0;
            squared met = {NULL, 0, 0};
            for (long k = 0; k < layers && !failed; k++) {
                const layer *l = all + k;
                if (l->rows != NULL) {
                    double square = lookups_square(l, n, linked, (double *)(linked + 2 * l->positions));
                    if (square < 0) {
#pragma omp atomic write
                        failed = 2;
                    }
                    total += square;
                    continue;
                }
                if (starts != NULL) {
                    total += person_square(l, starts[n], starts[n + 1], ratios + k * examples + n);
                    continue;
                }
                if (goes_by_gram(l)) {
                    int again = k > 0 && l->left == l[-1].left && l->positions == l[-1].positions
                                && l->left_width == l[-1].left_width && goes_by_gram(l - 1);
                    total += gram_square(l, n, again, scratch, ratios + k * examples + n);
                    continue;
                }
                if (l->positions > 1) {
                    total += tiles_square(l, n, scratch, ratios + k * examples + n);
                    continue;
                }
                if (l->left != met.left || l->left_width != met.width) /* a bias has the left factor of its weight */
                    met = (squared){l->left, l->left_width, sum_of_squares(l->left + n * l->left_width, l->left_width)};
                total += l->positions == 0 ? met.square
                                           : (met.square < smallest ? smallest : met.square)
                                                 * sum_of_squares(l->right + n * l->right_width, l->right_width);
            }
            squares[n] = total;
        }
        free(scratch), free(linked);
    }
    return failed;
}

/* Rows to be added: of a unit of people, in blocks that are added in single precision; or all of them in double. */
typedef struct {
    long first, rows, blocks;
    int exact;
} unit;

INLINE long block_end(const unit *u, long block) { return u->first + u->rows * (block + 1) / u->blocks; }

/* Both factors of a row, weighted; if `sized`, the size of the left one goes to the right one. Then nothing is left of a
 * weight of 0, also where the product is beyond single precision. */
static void weigh(const layer *l, float weight, int sized, long row, float *lefts, float *rights, long padded)
{
    const float *left = l->left + row * l->left_width, *right = l->right + row * l->right_width;
    float size = sized ? size_of(left, l->left_width) : 1;
    if (sized && weight == 0) {
        memset(lefts + row * l->left_width, 0, sizeof(float) * l->left_width);
        memset(rights + row * padded, 0, sizeof(float) * l->right_width);
        return;
    }
    for (long j = 0; j < l->left_width; j++)
        lefts[row * l->left_width + j] = left[j] * (1 / size) * weight;
    if (rights != NULL)
        for (long j = 0; j < l->right_width; j++)
            rights[row * padded + j] = right[j] * size;
}

/* Whether the size of some row matters: weighted, it would lose digits that others' sizes do not make up for. */
static int has_odd_sizes(const layer *l, long rows)
{
    for (long row = 0; row < rows; row++) {
        float largest = largest_of(l->left + row * l->left_width, l->left_width);
        if (largest != 0 && !(largest > 0x1p-40f && largest < 0x1p40f))
            return 1;
    }
    return 0;
}

static void add_tile(const layer *l, const unit *units, long count, const double *weights, const float *lefts,
                     const float *rights, long stride, long i, long j)
{
    enum { WIDE = VECTORS * LANES };
    long height = smaller(NUMBERS, l->left_width - i), valid = smaller(WIDE, l->right_width - j);
    int vectors = (valid + LANES - 1) / LANES;
    float met[NUMBERS * WIDE] __attribute__((aligned(64)));
    double sums[NUMBERS * WIDE] __attribute__((aligned(64))) = {0};
    for (const unit *u = units; u < units + count; u++) {
        if (u->exact) {
            for (long row = u->first; row < u->first + u->rows; row++)
                for (long a = 0; a < height; a++) {
                    double left = (weights != NULL ? weights[row] : 1) * lefts[row * l->left_width + i + a];
                    for (long b = 0; b < valid; b++)
                        sums[a * WIDE + b] += left * rights[row * stride + j + b];
                }
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

/* Adds the weighted products of a layer; called by all threads. If people have several rows, `weights` are those of rows,
 * and rows that are added in double precision get the weights `exact` there: rounded before, they would not cancel. */
static void add_layer(const layer *l, long rows, int sized, const float *weights, const double *exact,
                      const unit *units, long count, float *lefts, float *rights)
{
    long padded = padded_width(l->right_width);
    int copied = sized || padded != l->right_width; /* vectors read, and ignore, what follows a row */
    float *to = copied ? rights : NULL;
    if (exact != NULL) {
#pragma omp for schedule(static)
        for (long u = 0; u < count; u++)
            for (long row = units[u].first; row < units[u].first + units[u].rows; row++)
                weigh(l, units[u].exact && weights[row] != 0 ? 1 : weights[row], sized, row, lefts, to, padded);
    } else {
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++)
            weigh(l, weights[row / l->positions], sized, row, lefts, to, padded);
    }
    long high = (l->left_width + NUMBERS - 1) / NUMBERS, wide = (l->right_width + SLACK - 1) / SLACK;
#pragma omp for schedule(static)
    for (long t = 0; t < high * wide; t++)
        add_tile(l, units, count, exact, lefts, copied ? rights : l->right, padded, t % high * NUMBERS,
                 t / high * SLACK);
}

/* A unit has whole examples, and about as many rows as a block; or one example, and some blocks. It is added in double
 * precision where the products of one of them are so much larger than their sum that their rounding would show. */
static long cut_into_units(const layer *l, long examples, const double *ratios, unit *units)
{
    long at_once = BLOCK / l->positions > 1 ? BLOCK / l->positions : 1, count = 0;
    for (long n = 0; n < examples; n += at_once, count++) {
        long some = smaller(at_once, examples - n), rows = some * l->positions;
        int exact = 0;
        for (long i = n; l->positions > 1 && i < n + some; i++)
            exact |= !(ratios[i] * at_once * (BLOCK + 2) <= ROUNDING); /* also if it is no number */
        units[count] = (unit){n * l->positions, rows, (rows + BLOCK - 1) / BLOCK, exact};
    }
    return count;
}

/* The same for people with `starts`: so many in each unit. Those whose place on the list is below 0 are nobody, and do not
 * count, because how many of them stand between people depends on how many rows these have. A unit's blocks are the
 * shorter, the larger its products are over all layers; so where others' begin and end is the same whatever anybody has. */
static long cut_into_people(int64_t layers, long people, const int64_t *starts, const int64_t *whose,
                            const double *ratios, const float *weights, unit *units)
{
    long count = 0;
    for (long n = 0, next; n < people; n = next, count++) {
        double sum = 0;
        long met = 0;
        for (next = n; next < people && (met < PEOPLE || whose[next] < 0); next++) {
            double largest = 0;
            for (long k = 0; k < layers; k++) {
                double ratio = ratios[k * people + next];
                largest = ratio > largest || ratio != ratio ? ratio : largest; /* what is no number stays */
            }
            sum += weights[next] == 0 ? 0 : largest;
            met += whose[next] >= 0;
        }
        long rows = starts[next] - starts[n], block = BLOCK;
        if (!(sum * (BLOCK + 2) <= ROUNDING))
            block = sum * (SHORTEST + 2) <= ROUNDING ? (long)(ROUNDING / sum) - 2 : 0;
        units[count] = (unit){starts[n], rows, block ? (rows + block - 1) / block : 0, block == 0};
    }
    return count;
}

/* Add the weighted sums over the examples to the total of each layer. `ratios` are those of layer_squares, and `starts`
 * as there; with them comes `whose` they are, and weights in double precision, too. Returns 0, or 1 if there was no
 * memory. */
int add_layers(int64_t layers, const layer *all, int64_t examples, const int64_t *starts, const int64_t *whose,
               const float *weights, const double *fine_weights, const double *ratios)
{
    long left_room = 0, right_room = 0, work = 0, units_of = starts != NULL ? starts[examples] : examples;
    for (long k = 0; k < layers; k++) {
        if (all[k].rows != NULL)
            continue;
        long rows = units_of * all[k].positions, right = padded_width(all[k].right_width) * rows;
        left_room = all[k].left_width * rows > left_room ? all[k].left_width * rows : left_room;
        right_room = right > right_room ? right : right_room;
        work += units_of * (all[k].positions > 1 ? all[k].positions : 1) * all[k].left_width * all[k].right_width / 8;
    }
    float *lefts = malloc(sizeof(float) * (left_room + SLACK)), *rights = malloc(sizeof(float) * (right_room + SLACK));
    float *of_units = malloc(sizeof(float) * (units_of + 1));
    unit *units = malloc(sizeof(unit) * (examples + 1));
    double *exact = malloc(sizeof(double) * (units_of + 1));
    int64_t *linked = malloc(sizeof(int64_t) * (lookup_room(layers, all) + 1));
    int failed = lefts == NULL || rights == NULL || of_units == NULL || units == NULL || exact == NULL || linked == NULL;
    for (long n = 0; n < examples && !failed; n++)
        for (long row = starts != NULL ? starts[n] : n; row < (starts != NULL ? starts[n + 1] : n + 1); row++)
            exact[row] = starts != NULL ? fine_weights[n] : weights[n], of_units[row] = weights[n];
    long count = 0;
    if (starts != NULL && !failed)
        count = cut_into_people(layers, examples, starts, whose, ratios, weights, units);
    for (long k = 0; k < layers && !failed; k++) {
        const layer *l = all + k;
        if (l->rows != NULL) {
            for (long n = 0; n < examples; n++)
                add_lookups(l, n, exact[n], linked, (double *)(linked + 2 * l->positions));
            continue;
        }
        if (l->positions == 0) {
            add_weighted_rows(units_of, l->left_width, exact, l->left, l->total);
            continue;
        }
        if (starts == NULL)
            count = cut_into_units(l, examples, ratios + k * examples, units);
        long rows = units_of * l->positions;
        int sized = (starts != NULL || l->positions > 1) && has_odd_sizes(l, rows);
#pragma omp parallel if (work > MUCH)
        add_layer(l, rows, sized, of_units, starts != NULL ? exact : NULL, units, count, lefts, rights);
    }
    free(lefts), free(rights), free(of_units), free(units), free(exact), free(linked);
    return failed;
}

/* The factor from recorded gradients to examples' own, for people over the rows that each has; what is kept of a clipping
 * norm, and the room taken off it; the smallest norm and weight. */
typedef struct {
    double scale, kept, room, smallest_norm, smallest_weight;
} margins;

/* Norms and weights, as weights.py has them. Returns how many norms are not finite: their weights are 0. */
int clip(int64_t examples, const double *squares, const int64_t *starts, const float *floats, const double *doubles,
         const margins *m, double *norms, double *weights, double *scaled, float *narrow)
{
    int non_finite = 0;
    for (long n = 0; n < examples; n++) {
        double scale = starts != NULL ? m->scale / (starts[n + 1] - starts[n]) : m->scale;
        double norm = norms[n] = __builtin_sqrt(squares[n]) * scale;
        double limit = (floats != NULL ? floats[n] : doubles[n]) * m->kept - m->room;
        double weight = (limit > 0 ? limit : 0) / (norm < m->smallest_norm ? m->smallest_norm : norm);
        weight = weight > 1 ? 1 : weight;                                 /* NaN stays NaN */
        weights[n] = weight = weight > m->smallest_weight ? weight : 0;   /* and is 0 here */
        scaled[n] = weight * scale;
        narrow[n] = (float)scaled[n];
        non_finite += !__builtin_isfinite(norm);
    }
    return non_finite;
}

INLINE int is_to_be_summed(const layer *l) { return l->rows == NULL && l->right == NULL && l->positions > 1; }

/* Sums over positions, of layers that have them and no right factor; as rows of numbers in copies of these layers.
 * Returns NULL if there was no memory. */
static layer *summed(int64_t layers, const layer *all, int64_t examples, float **sums)
{
    long numbers = 1;
    for (long k = 0; k < layers; k++)
        numbers += is_to_be_summed(all + k) ? examples * all[k].left_width : 0;
    layer *found = malloc(sizeof(layer) * (layers + 1));
    float *place = *sums = malloc(sizeof(float) * numbers);
    if (found == NULL || place == NULL) {
        free(found), free(place);
        return NULL;
    }
    for (long k = 0; k < layers; k++) {
        found[k] = all[k];
        if (!is_to_be_summed(all + k))
            continue;
        position_sums(examples, all[k].positions, all[k].left_width, all[k].left, place);
        found[k].positions = 0, found[k].left = place;
        place += examples * all[k].left_width;
    }
    return found;
}

/* All of it in one call: layer_squares, clip and add_layers one after the other, for examples, or for people with `starts`
 * and `whose`. `others` are squared norms of what is added elsewhere, with the weights that are found, or NULL. Returns 0; or
 * else nothing was added: 1 if there was no memory, 2 if a table has no such row, 3 if a norm is not finite or a clipping
 * norm is above the `largest`. */
int add_clipped(int64_t layers, const layer *given, int64_t examples, const int64_t *starts, const int64_t *whose,
                double smallest, const double *others, const float *floats, const double *doubles, double largest,
                const margins *m, double *scaled, float *narrow)
{
    for (long n = 0; n < examples; n++)
        if ((floats != NULL ? floats[n] : doubles[n]) > largest)
            return 3;
    float *sums;
    layer *all = summed(layers, given, examples, &sums);
    if (all == NULL)
        return 1;
    double *ratios = malloc(sizeof(double) * ((layers + 3) * examples + 1));
    if (ratios == NULL) {
        free(all), free(sums);
        return 1;
    }
    double *squares = ratios + layers * examples, *norms = squares + examples, *weights = norms + examples;
    int failed = layer_squares(layers, all, examples, starts, smallest, ratios, squares);
    for (long n = 0; n < examples && others != NULL; n++)
        squares[n] += others[n];
    if (!failed && clip(examples, squares, starts, floats, doubles, m, norms, weights, scaled, narrow))
        failed = 3;
    if (!failed)
        failed = add_layers(layers, all, examples, starts, whose, narrow, starts != NULL ? scaled : NULL, ratios);
    free(ratios), free(all), free(sums);
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
    float *results;
    long line, columns, kernel, image, map; /* sizes: of a padded line, a kernel row, a kernel, an input, an output */
} task;

static task task_of(const convolution *c)
{
    long columns = c->kernel_width * c->channels;
    return (task){.c = c, .line = line_of(c), .columns = columns, .kernel = c->kernel_height * columns,
                  .image = c->height * c->width * c->channels, .map = c->out_height * c->out_width * c->out};
}

/* Does it `count` times, with room for a thread to work in that begins with zeros. Returns 0, or 1 if there was no memory. */
static int for_each(const void *t, long count, long room, void (*work)(const void *, long, float *))
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

static void output(const void *given, long n, float *padded)
{
    const task *t = given;
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

static void input_gradient(const void *given, long n, float *padded)
{
    const task *t = given;
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

/* ---- Gradients of kernels, for each example ----
 *
 * Of convolutions in one, two or three dimensions (lines and images have a depth of one). A gradient is a correlation of
 * what the convolution was given with the gradient of what it gave; of a transposed convolution, the other way round. */

typedef struct {
    int64_t channels, out, groups;
    int64_t size[3], out_size[3]; /* depth, height and width of the inputs and of the outputs */
    int64_t kernel[3], stride[3], dilation[3], padding[3];
    int64_t first, out_first; /* 1: channels come first in memory, in the inputs; in the outputs */
    int64_t by_columns;       /* 1: vectors run along columns, not along outputs */
} correlation;

typedef struct {
    const correlation *c;
    const int64_t *starts; /* of groups of examples whose gradients are added up; or NULL */
    const float *inputs, *gradients;
    float *results, *squares;
    long needed[3];        /* depth, height and width of the inputs, with room around, that kernels meet */
    long wide, high;       /* channels and outputs at once: those of a group, or all of a depthwise convolution */
    long copies;           /* of each channel: outputs of a channel in a depthwise convolution */
    long columns, places;  /* of a row of the kernel; rows */
    long image, map, kernel;
} correlating;

INLINE int is_depthwise(const correlation *c) { return c->groups > 1 && c->groups == c->channels; }

/* Places of the kernel that lie side by side in the inputs are columns of one row. */
INLINE int is_joined(const correlation *c) { return !is_depthwise(c) && (c->dilation[2] == 1 || c->kernel[2] == 1); }

static correlating correlating_of(const correlation *c)
{
    correlating t = {.c = c};
    long outputs = 1, inputs = 1, kernel = 1;
    for (int d = 0; d < 3; d++) {
        t.needed[d] = (c->out_size[d] - 1) * c->stride[d] + c->dilation[d] * (c->kernel[d] - 1) + 1;
        inputs *= c->size[d], outputs *= c->out_size[d], kernel *= c->kernel[d];
    }
    t.image = inputs * c->channels, t.map = outputs * c->out, t.kernel = kernel * c->channels / c->groups * c->out;
    t.copies = is_depthwise(c) ? c->out / c->groups : 1;
    t.wide = is_depthwise(c) ? c->out : c->channels / c->groups;
    t.high = is_depthwise(c) ? c->out : c->out / c->groups;
    t.columns = is_joined(c) ? c->kernel[2] * t.wide : t.wide;
    t.places = is_joined(c) ? c->kernel[0] * c->kernel[1] : kernel;
    return t;
}

/* A line of one group's channels, from place to place `apart` and from channel to channel `step`, to where they lie side
 * by side. */
INLINE void turn(const float *from, long places, long apart, long channels, long step, long copies, float *restrict to)
{
    if (step == 1 && copies == 1) {
        for (long x = 0; x < places; x++)
            memcpy(to + x * channels, from + x * apart, sizeof(float) * channels);
        return;
    }
    for (long i = 0; i < channels; i++)
        for (long x = 0; x < places; x++)
            to[x * channels + i] = from[x * apart + i / copies * step];
}

/* The inputs that a group's kernels meet, into the middle of the room there is. */
static void place_inputs(const correlating *t, const float *image, long group, float *padded)
{
    const correlation *c = t->c;
    long step = c->first ? c->size[0] * c->size[1] * c->size[2] : 1, apart = c->first ? 1 : c->channels;
    long before = c->padding[2], count = smaller(c->size[2], t->needed[2] - before);
    for (long z = 0; z < smaller(c->size[0], t->needed[0] - c->padding[0]); z++)
        for (long y = 0; y < smaller(c->size[1], t->needed[1] - c->padding[1]); y++) {
            const float *from = image + (z * c->size[1] + y) * c->size[2] * apart
                                + group * (c->channels / c->groups) * step;
            float *to = padded + (((z + c->padding[0]) * t->needed[1] + y + c->padding[1]) * t->needed[2] + before)
                                     * t->wide;
            if (step == 1 && t->copies == 1 && c->groups == 1 && count > 0)
                memcpy(to, from, sizeof(float) * count * t->wide);
            else
                turn(from, count, apart, t->wide, step, t->copies, to);
        }
}

/* Products of one place, or of a row of places, with the gradients: (outputs, columns) or (columns, outputs). */
static void correlate(const correlating *t, const float *met, const float *gradient, int as_given, float *result, int add)
{
    const correlation *c = t->c;
    long line = t->needed[2] * t->wide, flat = c->out_size[1] * c->out_size[2];
    for (long z = 0; z < c->out_size[0]; z++, add = 1) {
        factor inputs = {met + z * c->stride[0] * t->needed[1] * line, c->stride[2] * t->wide, c->stride[1] * line, 1};
        factor shares = {gradient + z * flat * t->high, t->high, c->out_size[2] * t->high, 1};
        if (as_given) /* channels first in memory: these are numbers, not vectors */
            shares = (factor){gradient + z * flat, 1, c->out_size[2], flat * c->out_size[0]};
        matrix to = {result, c->by_columns ? t->columns : t->high, NULL, add};
        if (c->by_columns)
            products(c->out_size[1], c->out_size[2], shares, t->high, inputs, t->columns, to);
        else
            products(c->out_size[1], c->out_size[2], inputs, t->columns, shares, t->high, to);
    }
}

/* Sums over positions of products of two vectors, for some places of a row of the kernel. */
INLINE void add_places(const correlating *t, const float *met, const float *gradient, float *result, int add, int count)
{
    const correlation *c = t->c;
    long wide = t->wide, line = t->needed[2] * wide, far = c->dilation[2] * wide, step = c->stride[2] * wide;
    for (long first = 0; first < wide; first += LANES) {
        vector sums[8] = {{0}};
        const float *share = gradient + first;
        for (long z = 0; z < c->out_size[0]; z++)
            for (long y = 0; y < c->out_size[1]; y++) {
                const float *one = met + (z * c->stride[0] * t->needed[1] + y * c->stride[1]) * line + first;
                for (long x = 0; x < c->out_size[2]; x++, one += step, share += wide) {
                    vector by = *(const vector *)share;
                    for (int k = 0; k < count; k++)
                        sums[k] += by * *(const vector *)(one + k * far);
                }
            }
        for (int k = 0; k < count; k++) {
            float *to = result + k * wide + first;
            if (add)
                sums[k] += load(to, wide - first);
            store(to, sums[k], wide - first);
        }
    }
}

static void correlate_depthwise(const correlating *t, const float *met, const float *gradient, float *result, int add)
{
    long kernel = t->c->kernel[2];
    for (long k = 0; k < kernel; k += 8) {
        const float *from = met + k * t->c->dilation[2] * t->wide;
        float *to = result + k * t->wide;
#define CASE_OF_PLACES(n) \
    case n: add_places(t, from, gradient, to, add, n); break;
        switch (smaller(8, kernel - k)) {
            CASE_OF_PLACES(1) CASE_OF_PLACES(2) CASE_OF_PLACES(3) CASE_OF_PLACES(4)
            CASE_OF_PLACES(5) CASE_OF_PLACES(6) CASE_OF_PLACES(7) CASE_OF_PLACES(8)
        }
    }
}

INLINE long size_of_padded(const correlating *t) { return t->needed[0] * t->needed[1] * t->needed[2] * t->wide; }

/* Of example n and a group of channels; the first example of a group of examples begins it. */
static void kernel_gradient(const correlating *t, long n, long group, int first, float *result, float *padded)
{
    const correlation *c = t->c;
    long positions = c->out_size[0] * c->out_size[1] * c->out_size[2], depthwise = is_depthwise(c);
    int as_given = c->out_first && c->by_columns && !depthwise;
    const float *gradient = t->gradients + n * t->map + group * t->high * (c->out_first ? positions : 1);
    place_inputs(t, t->inputs + n * t->image, group, padded);
    int as_vectors = depthwise || !c->by_columns; /* which may read what follows */
    if (!as_given && (c->out_first || t->high != c->out || (as_vectors && t->high % LANES))) {
        float *copied = padded + size_of_padded(t) + SLACK;
        turn(gradient, positions, c->out_first ? 1 : c->out, t->high, c->out_first ? positions : 1, 1, copied);
        gradient = copied;
    }
    long line = t->needed[2] * t->wide, place = 0;
    for (long z = 0; z < c->kernel[0]; z++)
        for (long y = 0; y < c->kernel[1]; y++) {
            const float *met = padded + (z * c->dilation[0] * t->needed[1] + y * c->dilation[1]) * line;
            if (depthwise) {
                correlate_depthwise(t, met, gradient, result + place * t->wide, !first);
                place += c->kernel[2];
                continue;
            }
            for (long x = 0; x < (is_joined(c) ? 1 : c->kernel[2]); x++, place++)
                correlate(t, met + x * c->dilation[2] * t->wide, gradient, as_given,
                          result + place * t->columns * t->high, !first);
        }
}

static void group_gradient(const void *given, long g, float *padded)
{
    const correlating *t = given;
    long begin = t->starts ? t->starts[g] : g, end = t->starts ? t->starts[g + 1] : g + 1;
    long rounds = is_depthwise(t->c) ? 1 : t->c->groups;
    float *result = t->results + g * t->kernel;
    for (long n = begin; n < end; n++)
        for (long group = 0; group < rounds; group++)
            kernel_gradient(t, n, group, n == begin, result + group * (t->kernel / rounds), padded);
    t->squares[g] = (float)sum_of_squares(result, t->kernel);
}

/* The gradients of the kernel, and their squared norms. The numbers of an example are (groups, rows, outputs, columns)
 * by columns, else (groups, rows, columns, outputs); of a depthwise convolution (places, outputs). Without `starts`
 * every example is a group of examples; with them none is empty. */
int kernel_gradients(const correlation *c, int64_t groups, const int64_t *starts, const float *inputs,
                     const float *gradients, float *results, float *squares)
{
    correlating t = correlating_of(c);
    t.starts = starts, t.inputs = inputs, t.gradients = gradients, t.results = results, t.squares = squares;
    return for_each(&t, groups, size_of_padded(&t) + SLACK + t.map + SLACK, group_gradient);
}

/* ---- Gradients of scales and shifts after a normalization, for each example ---- */

static double sum_of(const float *values, long count)
{
    halves sums[2] = {{0}};
    long i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int half = 0; half < 2; half++)
            sums[half] += __builtin_convertvector(*(const half_vector *)(values + i + half * LANES / 2), halves);
    double total = 0;
    for (; i < count; i++)
        total += values[i];
    for (int lane = 0; lane < LANES / 2; lane++)
        total += sums[0][lane] + sums[1][lane];
    return total;
}

static double squared_distance(const float *values, long count, double from)
{
    halves sums[2] = {{0}};
    long i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int half = 0; half < 2; half++) {
            halves met = __builtin_convertvector(*(const half_vector *)(values + i + half * LANES / 2), halves) - from;
            sums[half] += met * met;
        }
    double total = 0;
    for (; i < count; i++)
        total += (values[i] - from) * (values[i] - from);
    for (int lane = 0; lane < LANES / 2; lane++)
        total += sums[0][lane] + sums[1][lane];
    return total;
}

/* What is normalized over the last dimension of (examples, positions, width), from its mean or, without `centered`, from
 * zero: scales get the sums over positions of gradient times normalized input, shifts (or NULL) those of the gradient. */
void last_scales(int64_t examples, int64_t positions, int64_t width, int64_t centered, double eps,
                 const float *inputs, const float *gradients, float *scales, float *shifts)
{
#pragma omp parallel for schedule(static) if (examples * positions * width > MUCH)
    for (long n = 0; n < examples; n++) {
        float *restrict scale = scales + n * width, *restrict shift = shifts + n * width;
        memset(scale, 0, sizeof(float) * width);
        if (shifts != NULL)
            memset(shift, 0, sizeof(float) * width);
        for (long t = n * positions; t < (n + 1) * positions; t++) {
            const float *restrict met = inputs + t * width, *restrict share = gradients + t * width;
            double mean = centered ? sum_of(met, width) / width : 0;
            float middle = (float)mean;
            float by = (float)(1 / __builtin_sqrt(squared_distance(met, width, mean) / width + eps));
            for (long j = 0; j < width; j++)
                scale[j] += share[j] * ((met[j] - middle) * by);
            if (shifts != NULL)
                for (long j = 0; j < width; j++)
                    shift[j] += share[j];
        }
    }
}

/* Mean and inverse deviation of each channel's group, of one example (positions, channels). */
static void moments(long positions, long channels, long groups, double eps, const float *inputs, float *restrict middle,
                    float *restrict by)
{
    long size = channels / groups;
    sum_rows(positions, channels, inputs, middle);
    for (long g = 0; g < groups; g++) {
        float mean = (float)(sum_of(middle + g * size, size) / (positions * size));
        for (long j = g * size; j < (g + 1) * size; j++)
            middle[j] = mean;
    }
    memset(by, 0, sizeof(float) * channels);
    for (long t = 0; t < positions; t++)
        for (long j = 0; j < channels; j++)
            by[j] += (inputs[t * channels + j] - middle[j]) * (inputs[t * channels + j] - middle[j]);
    for (long g = 0; g < groups; g++) {
        float inverse = (float)(1 / __builtin_sqrt(sum_of(by + g * size, size) / (positions * size) + eps));
        for (long j = g * size; j < (g + 1) * size; j++)
            by[j] = inverse;
    }
}

static void scales_of_last(long positions, long channels, const float *inputs, const float *gradients,
                           const float *restrict middle, const float *restrict by, float *restrict scale,
                           float *restrict shift)
{
    memset(scale, 0, sizeof(float) * channels);
    memset(shift, 0, sizeof(float) * channels);
    for (long t = 0; t < positions; t++) {
        const float *restrict met = inputs + t * channels, *restrict share = gradients + t * channels;
        for (long j = 0; j < channels; j++) {
            scale[j] += share[j] * (met[j] - middle[j]);
            shift[j] += share[j];
        }
    }
    for (long j = 0; j < channels; j++)
        scale[j] *= by[j];
}

static void scales_of_first(long positions, long channels, long groups, double eps, const float *inputs,
                            const float *gradients, float *scale, float *shift)
{
    long size = channels / groups * positions;
    for (long g = 0; g < groups; g++) {
        double mean = sum_of(inputs + g * size, size) / size;
        double by = 1 / __builtin_sqrt(squared_distance(inputs + g * size, size, mean) / size + eps);
        for (long j = channels / groups * g; j < channels / groups * (g + 1); j++) {
            double sum = sum_of(gradients + j * positions, positions);
            shift[j] = (float)sum;
            double products = 0;
            halves sums = {0};
            const float *met = inputs + j * positions, *share = gradients + j * positions;
            long i = 0;
            for (; i + LANES / 2 <= positions; i += LANES / 2)
                sums += __builtin_convertvector(*(const half_vector *)(share + i), halves)
                        * (__builtin_convertvector(*(const half_vector *)(met + i), halves) - mean);
            for (; i < positions; i++)
                products += share[i] * (met[i] - mean);
            for (int lane = 0; lane < LANES / 2; lane++)
                products += sums[lane];
            scale[j] = (float)(products * by);
        }
    }
}

/* The same for what is normalized over groups of channels: (examples, positions, channels), or if channels come first
 * (examples, channels, positions). Returns 0, or 1 if there was no memory. */
int group_scales(int64_t examples, int64_t positions, int64_t channels, int64_t groups, int64_t first, double eps,
                 const float *inputs, const float *gradients, float *scales, float *shifts)
{
    float *all = malloc(sizeof(float) * (first ? 1 : 2 * examples * channels));
    if (all == NULL)
        return 1;
#pragma omp parallel for schedule(static) if (examples * positions * channels > MUCH)
    for (long n = 0; n < examples; n++) {
        const float *met = inputs + n * positions * channels, *share = gradients + n * positions * channels;
        float *scale = scales + n * channels, *shift = shifts + n * channels;
        if (first) {
            scales_of_first(positions, channels, groups, eps, met, share, scale, shift);
            continue;
        }
        float *middle = all + 2 * n * channels, *by = middle + channels;
        moments(positions, channels, groups, eps, met, middle, by);
        scales_of_last(positions, channels, met, share, middle, by, scale, shift);
    }
    free(all);
    return 0;
}

/* ---- Lookups in a table ---- */

/* Which of an example's lookups (examples, length) are of the same row: a use is a row and an example. Writes the use of
 * each lookup, and each use's example and row. Returns how many uses there are, or -1 if there was no memory. */
int64_t distinct_uses(int64_t examples, int64_t length, const int64_t *rows, int64_t *use_of, int64_t *owners,
                      int64_t *used)
{
    int bits = 1;
    while ((1L << bits) < 2 * length)
        bits++;
    long size = 1L << bits, count = 0;
    int64_t *places = malloc(sizeof(int64_t) * size); /* the use that a row was found to be, by a hash of the row */
    if (places == NULL)
        return -1;
    for (long n = 0; n < examples; n++) {
        memset(places, -1, sizeof(int64_t) * size);
        for (long k = n * length; k < (n + 1) * length; k++) {
            long place = (long)((uint64_t)rows[k] * 0x9E3779B97F4A7C15u >> (64 - bits));
            while (places[place] >= 0 && used[places[place]] != rows[k])
                place = (place + 1) & (size - 1);
            if (places[place] < 0) {
                owners[count] = n, used[count] = rows[k];
                places[place] = count++;
            }
            use_of[k] = places[place];
        }
    }
    free(places);
    return count;
}

/* Add weighted rows to rows of a table, in double precision: use u is of example owners[u], and of row used[u]. */
void add_uses(int64_t uses, int64_t width, const int64_t *owners, const int64_t *used, const double *weights,
              const float *values, double *total)
{
    for (long u = 0; u < uses; u++) {
        double weight = weights[owners[u]], *restrict to = total + used[u] * width;
        const float *restrict from = values + u * width;
        for (long j = 0; j < width; j++)
            to[j] += weight * from[j];
    }
}

/* ---- LSTM layers over time ---- */

INLINE vector blend(integers which, vector yes, vector no) { return (vector)choose(which, (integers)yes, (integers)no); }

/* e to a power, right to two units in the last place between -87 and 88, where it stays beyond; NaN stays NaN. */
INLINE vector exponential(vector x)
{
    vector zero = {0};
    x = blend(x > 88, zero + 88, blend(x < -87, zero - 87, x));
    vector turns = x * 1.44269504088896341f;
    integers whole = __builtin_convertvector(turns + blend(turns < 0, zero - 0.5f, zero + 0.5f), integers);
    vector by = __builtin_convertvector(whole, vector), rest = x - by * 0.693359375f + by * 2.12194440e-4f;
    vector sum = zero + 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1;
    return sum * (vector)((whole + 127) << 23);
}

INLINE vector logistic(vector x) { return 1 / (1 + exponential(-x)); }

INLINE vector hyperbolic_tangent(vector x)
{
    vector size = (vector)((integers)x & 0x7fffffff), square = x * x, zero = {0};
    vector far = 1 - 2 / (exponential(2 * size) + 1);
    vector near = zero - 5.70498872745e-3f;
    near = near * square + 2.06390887954e-2f;
    near = near * square - 5.37397155531e-2f;
    near = near * square + 1.33314422036e-1f;
    near = near * square - 3.33332819422e-1f;
    near = near * square * x + x;
    return blend(size > 0.625f, (vector)((integers)far | ((integers)x & (int32_t)0x80000000)), near);
}

typedef struct {
    int64_t times, rows, width;
    const float *weight;                /* (width, 4 width) forward, (4 width, width) backward; readable SLACK beyond */
    float *gates, *states, *cells, *bent; /* (times, rows, 4 width), twice (times + 1, rows, width), (times, rows, width) */
    const float *outputs;               /* gradients of the states after each time */
    float *found, *of_state, *of_cell;  /* gradients of gates' sums; of the last state and cell, then of the first */
} lstm;

/* Rows from `begin` to `end` of the batch, which know nothing of the others. */
static void lstm_forward_rows(const lstm *l, long begin, long end)
{
    long width = l->width, count = end - begin;
    for (long t = 0; t < l->times; t++) {
        long at = t * l->rows + begin, next = at + l->rows;
        factor before = {l->states + at * width, 1, 0, width}, weights = {l->weight, 4 * width, 0, 1};
        products(1, width, before, count, weights, 4 * width, (matrix){l->gates + at * 4 * width, 4 * width, NULL, 1});
        for (long n = 0; n < count; n++) {
            float *gates = l->gates + (at + n) * 4 * width;
            for (long j = 0; j < width; j += LANES) {
                long room = width - j, to = (next + n) * width + j;
                vector enter = logistic(load(gates + j, room)), keep = logistic(load(gates + width + j, room));
                vector new = hyperbolic_tangent(load(gates + 2 * width + j, room));
                vector show = logistic(load(gates + 3 * width + j, room));
                vector cell = keep * load(l->cells + (at + n) * width + j, room) + enter * new;
                vector bent = hyperbolic_tangent(cell);
                store(gates + j, enter, room), store(gates + width + j, keep, room);
                store(gates + 2 * width + j, new, room), store(gates + 3 * width + j, show, room);
                store(l->cells + to, cell, room), store(l->bent + (at + n) * width + j, bent, room);
                store(l->states + to, show * bent, room);
            }
        }
    }
}

static void lstm_backward_rows(const lstm *l, long begin, long end)
{
    long width = l->width, count = end - begin;
    for (long t = l->times - 1; t >= 0; t--) {
        long at = t * l->rows + begin;
        for (long n = 0; n < count; n++) {
            const float *gates = l->gates + (at + n) * 4 * width;
            float *found = l->found + (at + n) * 4 * width;
            for (long j = 0; j < width; j += LANES) {
                long room = width - j, here = (at + n) * width + j;
                vector enter = load(gates + j, room), keep = load(gates + width + j, room);
                vector new = load(gates + 2 * width + j, room), show = load(gates + 3 * width + j, room);
                vector bent = load(l->bent + here, room), before = load(l->cells + here, room);
                float *of_state = l->of_state + (begin + n) * width + j, *of_cell = l->of_cell + (begin + n) * width + j;
                vector state = load(of_state, room) + load(l->outputs + here, room);
                vector cell = load(of_cell, room) + state * show * (1 - bent * bent);
                store(found + j, cell * new * enter * (1 - enter), room);
                store(found + width + j, cell * before * keep * (1 - keep), room);
                store(found + 2 * width + j, cell * enter * (1 - new * new), room);
                store(found + 3 * width + j, state * bent * show * (1 - show), room);
                store(of_cell, cell * keep, room);
            }
        }
        factor found = {l->found + at * 4 * width, 1, 0, 4 * width}, weights = {l->weight, width, 0, 1};
        products(1, 4 * width, found, count, weights, width, (matrix){l->of_state + begin * width, width, NULL, 0});
    }
}

/* A layer over time: gates hold their sums without the states' part, and get their values. `of_state` is NULL forward;
 * backward it holds gradients of the last states. Returns 0, or 1 if there was no memory. */
int lstm_layer(int64_t times, int64_t rows, int64_t width, const float *weight, float *gates, float *states,
               float *cells, float *bent, const float *outputs, float *found, float *of_state, float *of_cell)
{
    float *copied = malloc(sizeof(float) * (4 * width * width + SLACK));
    if (copied == NULL)
        return 1;
    memset(copied + 4 * width * width, 0, sizeof(float) * SLACK);
    memcpy(copied, weight, sizeof(float) * 4 * width * width);
    lstm l = {times, rows, width, copied, gates, states, cells, bent, outputs, found, of_state, of_cell};
    long at_once = 4 * NUMBERS;
#pragma omp parallel for schedule(static) if (times * rows * width > MUCH)
    for (long begin = 0; begin < rows; begin += at_once) {
        if (of_state == NULL)
            lstm_forward_rows(&l, begin, smaller(rows, begin + at_once));
        else
            lstm_backward_rows(&l, begin, smaller(rows, begin + at_once));
    }
    free(copied);
    return 0;
}

/* ---- Max pooling, and a ReLU after it ---- */

typedef struct {
    int64_t examples, channels, height, width, out_height, out_width;
    int64_t kernel_height, kernel_width, stride_height, stride_width, padding_height, padding_width;
    int64_t rectify; /* 1: a ReLU follows */
} pooling;

enum { NOWHERE = 255 }; /* the place of a maximum that ReLU cuts off */

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

/* Words of AES-256 in counter mode, and normal numbers by Box and Muller: the same bits as `generators.py` and
 * `box_muller.py` give, which say what is done here and why. Compiled without contraction of products and sums, because
 * every operation is rounded by itself. Checked and called by `self_check.py` and `calls.py`; nothing here allocates. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#ifndef __AES__
#error "worth it only where the processor does AES"
#endif

enum { ROUNDS = 14, PAIRS = 8, GROUP = 2 * PAIRS, MOST_WORDS = 14, CHUNK = 64 * GROUP };

#define INLINE static inline __attribute__((always_inline))

/* Whether this processor can do what the compiler took for granted (a kept file may come from another one). */
int supported(void)
{
    __builtin_cpu_init();
    int can = __builtin_cpu_supports("aes") != 0;
#ifdef __AVX2__
    can = can && __builtin_cpu_supports("avx2");
#endif
#ifdef __AVX512F__
    can = can && __builtin_cpu_supports("avx512f");
#endif
#ifdef __AVX512DQ__
    can = can && __builtin_cpu_supports("avx512dq");
#endif
#ifdef __AVX512BW__
    can = can && __builtin_cpu_supports("avx512bw");
#endif
#ifdef __VAES__
    can = can && __builtin_cpu_supports("vaes");
#endif
    return can;
}

/* ---- AES-256 in counter mode (FIPS 197, SP 800-38A) ---- */

typedef struct {
    uint8_t keys[ROUNDS + 1][16];
    uint64_t position; /* in words: two of them are a block, whose counter begins at zero */
} stream;

INLINE __m128i load_key(const stream *from, int round) { return _mm_loadu_si128((const __m128i *)from->keys[round]); }

INLINE __m128i mixed(__m128i key, __m128i assist)
{
    key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
    key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
    return _mm_xor_si128(key, assist);
}

void aes_begin(stream *words, const uint8_t *key)
{
    __m128i even = _mm_loadu_si128((const __m128i *)key), odd = _mm_loadu_si128((const __m128i *)(key + 16));
    __m128i *keys = (__m128i *)words->keys;
    words->position = 0;
    _mm_storeu_si128(keys, even);
    _mm_storeu_si128(keys + 1, odd);
#define EXPAND(place, constant)                                                                                \
    even = mixed(even, _mm_shuffle_epi32(_mm_aeskeygenassist_si128(odd, constant), 0xff));                     \
    _mm_storeu_si128(keys + place, even);                                                                      \
    if (place < ROUNDS) {                                                                                      \
        odd = mixed(odd, _mm_shuffle_epi32(_mm_aeskeygenassist_si128(even, 0), 0xaa));                         \
        _mm_storeu_si128(keys + place + 1, odd);                                                               \
    }
    EXPAND(2, 0x01)
    EXPAND(4, 0x02)
    EXPAND(6, 0x04)
    EXPAND(8, 0x08)
    EXPAND(10, 0x10)
    EXPAND(12, 0x20)
    EXPAND(14, 0x40)
#undef EXPAND
}

/* The counter is a number of 16 bytes, the most significant first. */
INLINE __m128i counter_block(uint64_t counter)
{
    return _mm_set_epi64x((long long)__builtin_bswap64(counter), 0);
}

INLINE __m128i encrypted(const stream *words, __m128i block)
{
    block = _mm_xor_si128(block, load_key(words, 0));
    for (int round = 1; round < ROUNDS; round++)
        block = _mm_aesenc_si128(block, load_key(words, round));
    return _mm_aesenclast_si128(block, load_key(words, ROUNDS));
}

void aes_encrypt(const stream *words, const uint8_t *block, uint8_t *to)
{
    _mm_storeu_si128((__m128i *)to, encrypted(words, _mm_loadu_si128((const __m128i *)block)));
}

INLINE void encrypt_one(const stream *words, uint64_t counter, uint64_t *to)
{
    _mm_storeu_si128((__m128i *)to, encrypted(words, counter_block(counter)));
}

#if defined(__VAES__) && defined(__AVX512BW__)
enum { AT_ONCE = 32, VECTORS = 8 };

/* AT_ONCE blocks side by side, so that none has to wait for another. */
INLINE void encrypt_some(const stream *words, uint64_t counter, uint64_t *to)
{
    const __m512i turned = _mm512_broadcast_i32x4(_mm_set_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 0, 0, 0, 0, 0, 0, 0));
    __m512i blocks[VECTORS], key = _mm512_broadcast_i32x4(load_key(words, 0));
    __m512i counters = _mm512_add_epi64(_mm512_set1_epi64((long long)counter), _mm512_set_epi64(3, 0, 2, 0, 1, 0, 0, 0));
    for (int i = 0; i < VECTORS; i++) {
        __m512i next = _mm512_add_epi64(counters, _mm512_set1_epi64(4 * i));
        blocks[i] = _mm512_xor_si512(key, _mm512_maskz_shuffle_epi8(0xff00ff00ff00ff00, next, turned));
    }
    for (int round = 1; round < ROUNDS; round++) {
        key = _mm512_broadcast_i32x4(load_key(words, round));
        for (int i = 0; i < VECTORS; i++)
            blocks[i] = _mm512_aesenc_epi128(blocks[i], key);
    }
    key = _mm512_broadcast_i32x4(load_key(words, ROUNDS));
    for (int i = 0; i < VECTORS; i++)
        _mm512_storeu_si512(to + 8 * i, _mm512_aesenclast_epi128(blocks[i], key));
}
#else
enum { AT_ONCE = 8 };

INLINE void encrypt_some(const stream *words, uint64_t counter, uint64_t *to)
{
    __m128i blocks[AT_ONCE], key = load_key(words, 0);
    for (int i = 0; i < AT_ONCE; i++)
        blocks[i] = _mm_xor_si128(key, counter_block(counter + i));
    for (int round = 1; round < ROUNDS; round++) {
        key = load_key(words, round);
        for (int i = 0; i < AT_ONCE; i++)
            blocks[i] = _mm_aesenc_si128(blocks[i], key);
    }
    key = load_key(words, ROUNDS);
    for (int i = 0; i < AT_ONCE; i++)
        _mm_storeu_si128((__m128i *)to + i, _mm_aesenclast_si128(blocks[i], key));
}
#endif

void aes_words(stream *words, int64_t count, uint64_t *to)
{
    uint64_t pair[2];
    if (count > 0 && words->position % 2) {
        encrypt_one(words, words->position / 2, pair);
        *to++ = pair[1];
        words->position++;
        count--;
    }
    for (; count >= 2 * AT_ONCE; count -= 2 * AT_ONCE, to += 2 * AT_ONCE, words->position += 2 * AT_ONCE)
        encrypt_some(words, words->position / 2, to);
    for (; count >= 2; count -= 2, to += 2, words->position += 2)
        encrypt_one(words, words->position / 2, to);
    if (count > 0) {
        encrypt_one(words, words->position / 2, pair);
        *to = pair[0];
        words->position++;
    }
}

/* Words of many places: of each the same number of blocks, whose counters begin at place * 2^24. */
void aes_words_at(const stream *words, int64_t places, const int64_t *of, int64_t blocks, uint64_t *to)
{
    for (int64_t i = 0; i < places; i++)
        for (int64_t block = 0; block < blocks; block++, to += 2)
            encrypt_one(words, ((uint64_t)of[i] << 24) + (uint64_t)block, to);
}

/* `most` distinct numbers below a limit, of the words of a place. */
static void subset(const stream *words, int64_t place, int64_t most, int64_t limit, int64_t *chosen)
{
    uint64_t pair[2];
    for (int64_t k = 0; k < most; k++) {
        if (k % 2 == 0)
            encrypt_one(words, ((uint64_t)place << 24) + (uint64_t)k / 2, pair);
        int64_t end = limit - most + k + 1, number = (int64_t)(pair[k % 2] % (uint64_t)end);
        for (int64_t earlier = 0; earlier < k; earlier++)
            if (chosen[earlier] == number) {
                number = end - 1;
                break;
            }
        chosen[k] = number;
    }
}

/* Which records of these people take part, side by side, and where each one's begin: as `subsets.py` says. There is room
 * for `most` records of everybody. */
void choose_records(const stream *words, int64_t people, const int64_t *who, const int64_t *starts, const int64_t *order,
                    int64_t most, int64_t *records, int64_t *begins)
{
    int64_t row = 0;
    for (int64_t i = 0; i < people; i++) {
        const int64_t *own = order + starts[who[i]];
        int64_t count = starts[who[i] + 1] - starts[who[i]], some = count < most ? count : most, *to = records + row;
        begins[i] = row;
        if (count > most)
            subset(words, who[i], most, count, to);
        for (int64_t k = 0; k < some; k++)
            to[k] = own[count > most ? to[k] : k];
        if (count == 0)
            to[0] = -1;
        row += some + (count == 0);
    }
    begins[people] = row;
}

/* ---- Box and Muller ---- */

#ifdef __AVX512DQ__
enum { LANES = 8 }; /* numbers in a register */
#elif defined(__AVX2__)
enum { LANES = 4 };
#else
enum { LANES = 2 };
#endif

typedef double numbers __attribute__((vector_size(8 * LANES), aligned(8), may_alias));
typedef float narrow_numbers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int64_t integers __attribute__((vector_size(8 * LANES), aligned(8), may_alias));
typedef uint64_t bits __attribute__((vector_size(8 * LANES), aligned(8), may_alias));

static const double LOG[] = {
    0.666666666666667,   0.3999999999989851,  0.2857142862637019,  0.2222221107751543,
    0.18182892881223728, 0.15331608113624687, 0.14617735358744183,
};
static const double SIN[] = {
    -0.08074551218828077,  0.002490394570192008,   -3.657620417386549e-05,
    3.1336165355571974e-07, -1.7571791896413924e-09, 6.887487884376266e-12,
};
static const double COS[] = {
    -0.30842513753404244,  0.015854344243815488,    -0.0003259918869271997, 3.590860447449052e-06,
    -2.4611366239158276e-08, 1.1500679776350424e-10, -3.863159461753804e-13,
};
#define QUARTER_PI 0x1.921fb54442d18p-1
#define LN2_HIGH 0x1.62e42fefa38p-1
#define LN2_LOW 0x1.ef35793c7673p-45
#define NEAR_ONE 0.2928932188134524
#define SQRT_HALF_BITS 0x3FE6A09E667F3BCDull
#define SIGN (1ull << 63)

INLINE numbers all(double value) { return value - (numbers){0}; }

INLINE numbers choose(integers condition, numbers yes, numbers no)
{
    return (numbers)((condition & (integers)yes) | (~condition & (integers)no));
}

/* What older processors have no instruction for is done with others, rounded the same way. */
#ifdef __AVX512DQ__
INLINE numbers square_root(numbers x) { return (numbers)_mm512_sqrt_pd((__m512d)x); }

INLINE int any(integers condition) { return _mm512_test_epi64_mask((__m512i)condition, (__m512i)condition) != 0; }

INLINE numbers as_numbers(integers x) { return (numbers)_mm512_cvtepi64_pd((__m512i)x); }

INLINE integers rounded(numbers x, int small)
{
    (void)small;
    return (integers)_mm512_cvtpd_epi64((__m512d)x);
}
#else
#ifdef __AVX2__
INLINE numbers square_root(numbers x) { return (numbers)_mm256_sqrt_pd((__m256d)x); }

INLINE int any(integers condition) { return _mm256_movemask_pd((__m256d)condition) != 0; }
#else
INLINE numbers square_root(numbers x) { return (numbers)_mm_sqrt_pd((__m128d)x); }

INLINE int any(integers condition) { return _mm_movemask_pd((__m128d)condition) != 0; }
#endif

/* The upper and the lower half are put into numbers of fixed exponents, 2^84 and 2^52; only the last sum is rounded. */
INLINE numbers as_numbers(integers x)
{
    bits upper = (((bits)x >> 32) ^ 0x80000000ull) | 0x4530000000000000ull;
    bits lower = ((bits)x & 0xffffffffull) | 0x4330000000000000ull;
    return ((numbers)upper - (0x1p84 + 0x1p63 + 0x1p52)) + (numbers)lower;
}

/* To the nearest whole number; `small` if all are below 2^51, so that a sum with 3 * 2^51 has no fraction left. */
INLINE integers rounded(numbers x, int small)
{
    if (small)
        return (integers)(x + 0x1.8p52) - 0x4338000000000000ll;
    integers result;
    for (int i = 0; i < LANES; i++)
        result[i] = (int64_t)__builtin_rint(x[i]);
    return result;
}
#endif

/* Divided by a power of two, and rounded down. */
INLINE integers shifted(integers x, int shift)
{
#ifdef __AVX512F__
    return (integers)_mm512_sra_epi64((__m512i)x, _mm_cvtsi32_si128(shift));
#else
    return (integers)((((bits)x ^ SIGN) >> shift) - (SIGN >> shift));
#endif
}

/* A number of 64 bits, in units of 2^-64, with further words until it has 53 significant bits. */
static double continued(uint64_t distance, stream *further)
{
    unsigned __int128 value = distance;
    int words = 1;
    while (value < (1ull << 53) && words < MOST_WORDS) {
        uint64_t word;
        aes_words(further, 1, &word);
        value = value << 64 | word;
        words++;
    }
    double result = (double)(value ? value : 1);
    for (; words > 0; words--)
        result *= 0x1p-64;
    return result;
}

/* Where the words of a vector begin that stands so far on: a group has all its radii before its angles. */
INLINE long place_of(long vector) { return vector / (PAIRS / LANES) * GROUP + vector % (PAIRS / LANES) * LANES; }

/* So many vectors go through the same operations side by side. One by one each operation would wait for the one before,
 * and those that wait would soon take all the places in which a processor keeps them. */
#ifdef __AVX512F__
enum { TOGETHER = 4 };
#else
enum { TOGETHER = 2 };
#endif
#define EACH _Pragma("GCC unroll 4") for (int v = 0; v < count; v++)

INLINE void polynomials(const double *coefficients, int terms, int count, const numbers *x, numbers *values)
{
    EACH values[v] = all(coefficients[terms - 1]);
    _Pragma("GCC unroll 8") for (int i = terms - 2; i >= 0; i--)
        EACH values[v] = values[v] * x[v] + coefficients[i];
}

/* What words say of radii, as numbers up to 1/2: how far a uniform number is from 0, or from 1. */
static void all_nearness(long vectors, const uint64_t *words, stream *further, double *nearness)
{
    for (long v = 0; v < vectors; v++) {
        integers word = *(const integers *)(words + place_of(v)), distance = word ^ (word >> 63);
        *(numbers *)(nearness + v * LANES) = as_numbers(distance) * 0x1p-64;
        if (__builtin_expect(any(distance < (1ll << 53)), 0))
            for (int i = 0; i < LANES; i++)
                if (distance[i] < (1ll << 53))
                    nearness[v * LANES + i] = continued((uint64_t)distance[i], further);
    }
}

/* The radii of some pairs, in place of that. */
INLINE void some_radii(int count, long first, const uint64_t *words, double scale, double *radii)
{
    numbers exponent[TOGETHER], fraction[TOGETHER], s[TOGETHER], square[TOGETHER], sum[TOGETHER];
    EACH {
        integers upper = *(const integers *)(words + place_of(first + v)) < 0;
        numbers nearness = *(const numbers *)(radii + (first + v) * LANES);
        /* It is at most 1/2, so the power of two is below 1: 2^-power. */
        bits power = (SQRT_HALF_BITS + ((1ull << 52) - 1) - (bits)nearness) >> 52;
        numbers mantissa = (numbers)((bits)nearness + (power << 52));
        integers far = nearness >= NEAR_ONE;
        exponent[v] = choose(upper, choose(far, all(1.0), all(0.0)), as_numbers((integers)power));
        fraction[v] = choose(upper, choose(far, 1.0 - 2.0 * nearness, -nearness), mantissa - 1.0);
    }
    EACH s[v] = fraction[v] / (2.0 + fraction[v]);
    EACH square[v] = s[v] * s[v];
    polynomials(LOG, 7, count, square, sum);
    EACH {
        numbers correction = s[v] * (fraction[v] - square[v] * sum[v]);
        numbers half = exponent[v] * LN2_HIGH + ((correction + exponent[v] * LN2_LOW) - fraction[v]);
        *(numbers *)(radii + (first + v) * LANES) = square_root(half + half) * scale;
    }
}

static void all_radii(long groups, const uint64_t *words, stream *further, double scale, double *radii)
{
    long vectors = groups * PAIRS / LANES, first = 0;
    all_nearness(vectors, words, further, radii);
    for (; first + TOGETHER <= vectors; first += TOGETHER)
        some_radii(TOGETHER, first, words, scale, radii);
    for (; first < vectors; first++)
        some_radii(1, first, words, scale, radii);
}

/* The pairs themselves, of these radii and of words that are their angles. */
INLINE void turned(int count, long first, const double *radii, const uint64_t *words, numbers *ones, numbers *others)
{
    numbers part[TOGETHER], square[TOGETHER], sine[TOGETHER], cosine[TOGETHER];
    EACH {
        bits turn = *(const bits *)(words + place_of(first + v) + PAIRS);
        part[v] = as_numbers((integers)(turn & ((1ull << 61) - 1))) * 0x1p-61;
        square[v] = part[v] * part[v];
    }
    polynomials(SIN, 6, count, square, sine);
    polynomials(COS, 7, count, square, cosine);
    EACH {
        bits turn = *(const bits *)(words + place_of(first + v) + PAIRS);
        integers swapped = (integers)(turn & (1ull << 61)) != 0;
        numbers radius = *(const numbers *)(radii + (first + v) * LANES);
        sine[v] = radius * (part[v] * (QUARTER_PI + square[v] * sine[v]));
        cosine[v] = radius * (1.0 + square[v] * cosine[v]);
        ones[v] = (numbers)((bits)choose(swapped, sine[v], cosine[v]) ^ (turn & SIGN));
        others[v] = (numbers)((bits)choose(swapped, cosine[v], sine[v]) ^ ((turn << 1) & SIGN));
    }
}

/* Normal numbers of these words, which are groups, and of this standard deviation. */
void normals(int64_t groups, const uint64_t *words, stream *further, double scale, double *to)
{
    for (long g = 0; g < groups; g++, words += GROUP, to += GROUP) {
        double radii[PAIRS];
        all_radii(1, words, further, scale, radii);
        for (int vector = 0; vector < PAIRS / LANES; vector++)
            turned(1, vector, radii, words, (numbers *)to + vector, (numbers *)(to + PAIRS) + vector);
    }
}

INLINE numbers read(const float *floats, const double *doubles, long place)
{
    if (floats != NULL)
        return __builtin_convertvector(*(const narrow_numbers *)(floats + place), numbers);
    return *(const numbers *)(doubles + place);
}

/* To the nearest whole numbers, after scaling by a power of two. Tells whether all are finite and below the largest. */
int quantize(int64_t count, const float *floats, const double *doubles, double scale, double largest, int64_t *to)
{
    integers good = ~(integers){0};
    long place = 0;
    for (; place + LANES <= count; place += LANES) {
        numbers x = read(floats, doubles, place) * scale;
        numbers size = (numbers)((bits)x & ~SIGN);
        good &= size < largest;
        *(integers *)(to + place) = rounded(x, !any(size >= 0x1p51));
    }
    int all_good = !any(~good);
    for (; place < count; place++) {
        double x = (floats != NULL ? floats[place] : doubles[place]) * scale;
        all_good = all_good && __builtin_fabs(x) < largest;
        to[place] = all_good ? (int64_t)__builtin_rint(x) : 0;
    }
    return all_good;
}

typedef struct {
    double deviation; /* of the noise, in units */
    int64_t shift;    /* the grid's step is 2^shift units, */
    double step;      /* which is this number */
} scale;

INLINE numbers noised(const int64_t *totals, numbers noise, scale by)
{
    int small = by.deviation < 0x1p45; /* no number is beyond 36 deviations */
    int64_t half = (1ll << by.shift) >> 1;
    return as_numbers(shifted(*(const integers *)totals + (rounded(noise, small) + half), (int)by.shift)) * by.step;
}

/* Some whole numbers plus noise, rounded to the grid: to where there is a place for it, as floats or as doubles. */
INLINE void release_some(int count, long first, const double *radii, const uint64_t *words, scale by,
                         const int64_t *totals, float *floats, double *doubles)
{
    numbers made[2][TOGETHER];
    turned(count, first, radii, words, made[0], made[1]);
    for (int of_pair = 0; of_pair < 2; of_pair++)
        EACH {
            long place = place_of(first + v) + of_pair * PAIRS;
            numbers result = noised(totals + place, made[of_pair][v], by);
            if (floats != NULL)
                *(narrow_numbers *)(floats + place) = __builtin_convertvector(result, narrow_numbers);
            else
                *(numbers *)(doubles + place) = result;
        }
}

INLINE void release_groups(long groups, const double *radii, const uint64_t *words, scale by, const int64_t *totals,
                           float *floats, double *doubles)
{
    long vectors = groups * PAIRS / LANES, first = 0;
    for (; first + TOGETHER <= vectors; first += TOGETHER)
        release_some(TOGETHER, first, radii, words, by, totals, floats, doubles);
    for (; first < vectors; first++)
        release_some(1, first, radii, words, by, totals, floats, doubles);
}

void release(stream *words, stream *further, const scale *by, int64_t count, const int64_t *totals, float *floats,
             double *doubles)
{
    uint64_t some[CHUNK];
    double radii[CHUNK / 2];
    for (long start = 0; start < count; start += CHUNK) {
        long size = count - start < CHUNK ? count - start : CHUNK;
        long whole = size / GROUP, rest = size % GROUP, groups = whole + (rest != 0), end = start + whole * GROUP;
        aes_words(words, groups * GROUP, some);
        all_radii(groups, some, further, by->deviation, radii);
        if (floats != NULL)
            release_groups(whole, radii, some, *by, totals + start, floats + start, NULL);
        else
            release_groups(whole, radii, some, *by, totals + start, NULL, doubles + start);
        if (rest) {
            int64_t last[GROUP] = {0};
            double results[GROUP];
            memcpy(last, totals + end, sizeof *last * rest);
            release_groups(1, radii + whole * PAIRS, some + whole * GROUP, *by, last, NULL, results);
            for (long i = 0; i < rest; i++)
                if (floats != NULL)
                    floats[end + i] = (float)results[i];
                else
                    doubles[end + i] = results[i];
        }
    }
}
